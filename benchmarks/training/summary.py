"""The results as Markdown tables, as JSON, and as a figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from parallel_sgd import UserError

from ..panels import FilePath
from ..report import Report, machine, table
from .contenders import CONTENDERS, PLAIN
from .costs import Memory, OwnCost
from .figures import TIMES, draw_bars, draw_ways
from .step_times import StepTime
from .to_loss import Goal, Learned, ToLoss, goal_of, to_losses

NO_FIGURE = "--figure goes with --to-loss: of steps there are tables alone"


@dataclass
class Results:
    """
    Attributes:
        hosts: how many, with one rank each.
        machine: of the measurement, with the versions of both sides.
        times: of steps.
        runs: until the last of the losses was reached.
        to_loss: the reported contenders; empty if only steps were measured.
        torch: whether both sides train PyTorch's models.
        here: whether the ranks were on this machine, and not on emulated hosts.
        own_costs, memory: of the learner for PyTorch's models, and of the contenders.
    """

    hosts: int
    machine: dict[str, Any] = field(default_factory=machine)
    times: list[StepTime] = field(default_factory=list)
    runs: list[Learned] = field(default_factory=list)
    to_loss: Sequence[str] = ()
    torch: bool = False
    here: bool = False
    own_costs: list[OwnCost] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)

    @property
    def title(self) -> str:
        what = "Training PyTorch's models" if self.torch else "Training"
        where = "ranks of one machine," if self.here else "emulated hosts, one rank and"
        return (
            f"{what} on {self.hosts} {where} one thread each: "
            "ours beside PyTorch's DistributedDataParallel"
        )

    @property
    def goal(self) -> Goal:
        """The task, and the losses to reach."""
        return goal_of(self.torch)

    @property
    def models(self) -> list[str]:
        """The models whose steps were measured, in order."""
        return list(dict.fromkeys(time.model for time in self.times))

    def by_rate(self, model: str) -> dict[str, dict[str, StepTime]]:
        """Return step times by rate and contender, in the order of tables."""
        found: dict[str, dict[str, StepTime]] = {}
        for time in self.times:
            if time.model == model:
                found.setdefault(time.rate, {})[time.contender] = time
        return {
            rate: {name: times[name] for name in CONTENDERS if name in times}
            for rate, times in found.items()
        }

    def ways(self) -> dict[str, list[ToLoss]]:
        """Return the contenders' ways to every loss, by rate."""
        return {
            rate: [
                way
                for name, time in times.items()
                if name in self.to_loss
                for way in to_losses(self.goal, name, time.seconds, self.runs)
            ]
            for rate, times in self.by_rate(self.goal.task).items()
            if self.to_loss
        }


class Summary(Report):
    """A report on the results: tables, and a figure.

    Args:
        bars: whether the figure has bars, of four contenders to the last loss alone.
    """

    def __init__(self, results: Results, *, bars: bool = False) -> None:
        super().__init__(results.title)
        self.results, self.bars = results, bars

    def print(self) -> None:
        results = self.results
        tables = [step_table(results, model) for model in results.models]
        tables += [own_cost_table(results.own_costs)] if results.own_costs else []
        tables += [memory_table(results.memory)] if results.memory else []
        tables += [to_loss_table(results)] if results.to_loss else []
        for lines in tables:
            print("\n".join(lines), end="\n\n")

    def content(self) -> dict[str, Any]:
        return asdict(self.results)

    def draw(self, path: FilePath) -> None:
        """Draw the ways to a loss: training.png means training-to-loss.png, except for bars.

        Raises:
            UserError: only steps were measured.
        """
        ways, path = self.results.ways(), Path(path)
        if not ways:
            raise UserError(NO_FIGURE)
        what = "PyTorch's transformer" if self.results.torch else "a byte-level language model"
        title = f"Seconds until {what} reaches a test loss, on {self.results.hosts} hosts"
        if self.bars:
            last = f"a test loss of {self.results.goal.targets[-1]:g} nats"
            draw_bars(ways, title.replace("a test loss", last), path)
            return
        path = path.with_stem(f"{path.stem}-to-loss")
        draw_ways(ways, title, path, modules=self.results.torch)


def _by_contender(title: str, columns: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a table of contenders by columns."""
    names = [name for name in CONTENDERS if any(name in cells for cells in columns.values())]
    rows = [[name, *(cells.get(name, "") for cells in columns.values())] for name in names]
    return table([title, *columns], rows)


def step_table(results: Results, model: str) -> list[str]:
    """Return contenders by rates: seconds a step, and speed-up over plain DDP."""

    def cell(time: StepTime, plain: StepTime | None) -> str:
        text = f"{time.seconds:.3f} s" if time.seconds < 1 else f"{time.seconds:.1f} s"
        if plain is None or plain is time:
            return text
        return f"{text}, {plain.seconds / time.seconds:.1f}{TIMES}"

    by_rate = results.by_rate(model)
    columns = {
        rate: {name: cell(time, times.get(PLAIN)) for name, time in times.items()}
        for rate, times in by_rate.items()
    }
    return _by_contender(model, columns)


def own_cost_table(costs: Iterable[OwnCost]) -> list[str]:
    """Return models by a plain loop, the learner and DDP: seconds a step, and what they add."""
    rows = [
        [cost.model, f"{(plain := cost.plain_seconds):.3f}"]
        + [f"{s:.3f}, {s / plain - 1:+.0%}" for s in (cost.seconds, cost.ddp_seconds)]
        for cost in costs
    ]
    return table(["s a step of one process", "a plain loop", "the learner", PLAIN], rows)


def memory_table(memory: Sequence[Memory]) -> list[str]:
    """Return contenders by models: MiB added to a rank by training."""
    columns: dict[str, dict[str, str]] = {}
    for one in memory:
        columns.setdefault(one.model, {})[one.contender] = f"{one.added_bytes / 2**20:.0f}"
    return _by_contender("MiB added to a rank", columns)


def to_loss_table(results: Results) -> list[str]:
    """Return contenders by rates and losses: steps, seconds, and speed-up over plain DDP."""
    by_rate, targets = results.ways(), results.goal.targets

    def cell(ways: list[ToLoss], way: ToLoss) -> str:
        if not way.reached:
            return "never"
        plain, text = plain_seconds(ways, way.target), f"{way.seconds:.3g} s"
        beside = plain and way.contender != PLAIN
        return f"{text}, {plain / way.seconds:.1f}{TIMES}" if plain and beside else text

    rows = []
    for name in results.to_loss:
        own = [(ways, way) for ways in by_rate.values() for way in ways if way.contender == name]
        steps = (f"{way.steps:g}" if way.reached else "never" for _, way in own[: len(targets)])
        rows.append([name, ", ".join(steps), *(cell(ways, way) for ways, way in own)])
    head = [f"{rate}: {target:g}" for rate in by_rate for target in targets]
    steps_to = f"steps to {', '.join(f'{target:g}' for target in targets)} nats"
    return table(["seconds to a loss", steps_to, *head], rows)


def plain_seconds(ways: Iterable[ToLoss], target: float) -> float | None:
    """Return the seconds of plain DDP to a loss, if reached."""
    of = (PLAIN, target, True)
    return next(
        (way.seconds for way in ways if (way.contender, way.target, way.reached) == of), None
    )
