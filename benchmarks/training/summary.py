"""The results as Markdown tables, as JSON, and as figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from parallel_sgd.command_line.units import bits_per_s

from ..panels import FilePath
from ..report import Report, load, machine, table
from .contenders import CONTENDERS, PLAIN
from .figures import TIMES, draw_times, draw_ways
from .memory import Memory
from .own_cost import OwnCost
from .step_times import StepTime
from .tasks import BYTES, MODELS, TEXT
from .to_loss import Goal, Learned, ToLoss, goal_of, to_losses


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

    def by_rate(self, model: str) -> dict[float, dict[str, StepTime]]:
        """Return step times by rate and contender, in the order of tables."""
        rates = dict.fromkeys(time.rate for time in self.times if time.model == model)
        return {rate: self.of(model, rate) for rate in rates}

    def of(self, model: str, rate: float) -> dict[str, StepTime]:
        """Return step times by contender, in the order of tables."""
        times = {t.contender: t for t in self.times if (t.model, t.rate) == (model, rate)}
        return {name: times[name] for name in CONTENDERS if name in times}

    def ways(self) -> dict[float, list[ToLoss]]:
        """Return the contenders' ways to every loss, by rate."""
        goal, names = self.goal, [name for name in CONTENDERS if name in self.to_loss]
        return {
            rate: [
                way for name in names for way in to_losses(goal, name, times, self.runs, self.hosts)
            ]
            for rate, times in self.by_rate(goal.task).items()
            if names
        }


class Summary(Report):
    """A report on the results."""

    def __init__(self, results: Results) -> None:
        super().__init__(results.title)
        self.results = results

    def print(self) -> None:
        results = self.results
        tables = [step_table(results, model) for model in results.models]
        tables += [own_cost_table(results)] if results.own_costs else []
        tables += [memory_table(results)] if results.memory else []
        tables += [to_loss_table(results)] if results.to_loss else []
        for lines in tables:
            print("\n".join(lines), end="\n\n")

    def content(self) -> dict[str, Any]:
        content = asdict(self.results)
        for entry in content["times"]:
            entry["rate"] = words(entry["rate"])  # JSON knows no infinity
        return content

    def draw(self, path: FilePath) -> None:
        """Draw the ways to a loss, or seconds a step of each model: training-5M.png and more."""
        path, results = Path(path), self.results
        if by_rate := results.ways():
            title = f"{self.title}; seconds of training to a test loss, bytes of Python's library"
            ways = {words(rate): ways for rate, ways in by_rate.items()}
            draw_ways(ways, title, path.with_stem(f"{path.stem}-to-loss"))
            return
        for model in results.models:
            panels = {words(rate): times for rate, times in results.by_rate(model).items()}
            title = f"{self.title}; {called(model)}, seconds a step"
            draw_times(panels, title, path.with_name(f"{path.stem}-{model}{path.suffix}"))


def read(path: str) -> Results:
    """Read the results in a JSON file.

    Raises:
        UserError: the file holds something else.
    """
    results = load(path, Results)
    results.times = [replace(time, rate=bits_per_s(str(time.rate))) for time in results.times]
    return results


def step_table(results: Results, model: str) -> list[str]:
    """Return contenders by rates: seconds a step, and speed-up over plain DDP."""
    by_rate = results.by_rate(model)
    names = [name for name in CONTENDERS if any(name in times for times in by_rate.values())]
    rows = [[name, *(_cell(times, name) for times in by_rate.values())] for name in names]
    return table([called(model), *map(spoken, by_rate)], rows)


def own_cost_table(results: Results) -> list[str]:
    """Return models by a plain loop, the learner and DDP: seconds a step, and what they add."""
    rows = [
        [called(cost.model), f"{(plain := cost.plain_seconds):.3f}"]
        + [f"{s:.3f}, {s / plain - 1:+.0%}" for s in (cost.seconds, cost.ddp_seconds)]
        for cost in results.own_costs
    ]
    return table(["s a step of one process", "a plain loop", "the learner", PLAIN], rows)


def memory_table(results: Results) -> list[str]:
    """Return contenders by models: MiB added to a rank by training."""
    models = [*dict.fromkeys(one.model for one in results.memory)]
    added = {(o.contender, o.model): f"{o.added_bytes / 2**20:.0f}" for o in results.memory}
    names = dict.fromkeys(one.contender for one in results.memory)
    rows = [[name, *(added.get((name, model), "") for model in models)] for name in names]
    return table(["MiB added to a rank", *map(called, models)], rows)


def to_loss_table(results: Results) -> list[str]:
    """Return contenders by rates and losses: steps, seconds, and speed-up over plain DDP."""
    by_rate, targets = results.ways(), results.goal.targets
    head = [f"{spoken(rate)}: {target:g}" for rate in by_rate for target in targets]
    steps = f"steps to {', '.join(f'{target:g}' for target in targets)} nats"
    rows = []
    for name in results.to_loss:
        own = [[way for way in ways if way.contender == name] for ways in by_rate.values()]
        counts = ", ".join(f"{way.steps:g}" if way.reached else "never" for way in own[0])
        cells = [
            _way(way, plain_seconds(ways, way.target))
            for those, ways in zip(own, by_rate.values(), strict=True)
            for way in those
        ]
        rows.append([name, counts, *cells])
    return table(["seconds to a loss", steps, *head], rows)


def plain_seconds(ways: Iterable[ToLoss], target: float) -> float | None:
    """Return the seconds of plain DDP to a loss, if reached."""
    of = (PLAIN, target, True)
    return next(
        (way.seconds for way in ways if (way.contender, way.target, way.reached) == of), None
    )


def _way(way: ToLoss, plain: float | None) -> str:
    if not way.reached:
        return "never"
    text = f"{way.seconds:.3g} s"
    return f"{text}, {plain / way.seconds:.1f}{TIMES}" if plain and way.contender != PLAIN else text


def _cell(times: dict[str, StepTime], name: str) -> str:
    if name not in times:
        return ""
    seconds = times[name].seconds
    text = f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.1f} s"
    if PLAIN in times and name != PLAIN:
        text += f", {times[PLAIN].seconds / seconds:.1f}{TIMES}"
    return text


def called(model: str) -> str:
    """Name a model in a title."""
    if model in MODELS:
        return f"{model} parameters"
    return "language model" if model in (BYTES, TEXT) else model


def words(rate: float) -> str:
    """Write a rate as on command lines."""
    if math.isinf(rate):
        return "unlimited"
    return f"{rate / 1e9:g}gbit" if rate >= 1e9 else f"{rate / 1e6:g}mbit"


def spoken(rate: float) -> str:
    """Write a rate as in texts."""
    return words(rate).replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")
