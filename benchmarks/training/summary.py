"""The results as rows, as JSON, as the README's table, and as figures."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from parallel_sgd.command_line.units import bits_per_s

from ..report import DrawnReport, load, machine, table
from .contenders import CONTENDERS, HOOKS, PLAIN
from .figures import TIMES, draw_times, draw_ways
from .memory import Memory
from .own_cost import OwnCost
from .step_times import StepTime
from .tasks import BYTES, MODELS, TEXT
from .to_loss import MLP_GOAL, TRANSFORMER_GOAL, Goal, Learned, ToLoss, to_losses

MIB = 1 << 20


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
        where = "ranks of one machine" if self.here else "emulated hosts, one rank"
        each = "one thread each" if self.here else "and one thread each"
        return (
            f"{what} on {self.hosts} {where}{',' * self.here} {each}: "
            "ours beside PyTorch's DistributedDataParallel"
        )

    @property
    def goal(self) -> Goal:
        """The task, and the losses to reach."""
        return TRANSFORMER_GOAL if self.torch else MLP_GOAL

    def cases(self) -> list[tuple[str, float]]:
        """Return the measured models and rates, in order."""
        return list(dict.fromkeys((time.model, time.rate) for time in self.times))

    def of(self, model: str, rate: float) -> dict[str, StepTime]:
        """Return step times by contender, in the order of tables."""
        times = {t.contender: t for t in self.times if (t.model, t.rate) == (model, rate)}
        return {name: times[name] for name in CONTENDERS if name in times}

    def ways(self) -> dict[float, list[ToLoss]]:
        """Return the contenders' ways to every loss, by rate."""
        goal = self.goal
        return {
            rate: [
                way
                for name in CONTENDERS
                if name in self.to_loss
                for way in to_losses(
                    goal, name, rate, self.of(goal.task, rate), self.runs, self.hosts
                )
            ]
            for model, rate in self.cases()
            if model == goal.task and self.to_loss
        }


class Summary(DrawnReport):
    """A report on the results.

    Args:
        results: of the measurement.
        markdown: print the tables of the README, not the rows.
    """

    def __init__(self, results: Results, *, markdown: bool = False) -> None:
        super().__init__(results.title)
        self.results, self.markdown = results, markdown
        for model, rate in results.cases():
            self._add_times(f"{model}, {words(rate)}", results.of(model, rate))
        for rate, ways in results.ways().items():
            self._add_ways(rate, ways)
        for cost in results.own_costs:
            self.add(
                f"{cost.model}, one rank, a step of the learner",
                cost.seconds,
                "s",
                f"a plain loop of PyTorch's, {cost.plain_seconds:.3g} s, in turn; and {PLAIN}, "
                f"{cost.ddp_seconds:.3g} s",
                cost.seconds / cost.plain_seconds,
            )
        self._add_memory()

    def _add_times(self, case: str, times: dict[str, StepTime]) -> None:
        plain = times.get(PLAIN)
        hooks = [times[name] for name in HOOKS if name in times]
        best = min(hooks, key=lambda time: time.seconds, default=None)
        for name, time in times.items():
            reference = f"{PLAIN}, {plain.seconds:.3g} s" if plain else "not measured"
            self.add(
                f"{case}, {name}",
                time.seconds,
                "s",
                f"{reference}; {time.samples_per_s:,.0f} samples/s",
                plain.seconds / time.seconds if plain else None,
            )
            if best and CONTENDERS[name].ours and CONTENDERS[name].period:
                self.add(
                    f"{case}, {name}, beside the best hook",
                    time.seconds,
                    "s",
                    f"{best.contender}, {best.seconds:.3g} s",
                    best.seconds / time.seconds,
                )

    def _add_memory(self) -> None:
        plain = {one.model: one for one in self.results.memory if one.contender == PLAIN}
        for one in self.results.memory:
            beside = plain.get(one.model)
            self.add(
                f"{one.model}, {one.contender}: memory of a rank",
                one.added_bytes / MIB,
                "MiB",
                f"{PLAIN}, {beside.added_bytes / MIB:.0f} MiB" if beside else "not measured",
                one.added_bytes / beside.added_bytes if beside else None,
            )

    def _add_ways(self, rate: float, ways: Sequence[ToLoss]) -> None:
        for way in ways:
            plain = plain_seconds(ways, way.target)
            self.add(
                f"{words(rate)}, {way.contender}: to {way.target:g} nats",
                way.seconds,
                "s",
                (f"{PLAIN}, {plain:.3g} s; " if plain else "")
                + ("" if way.reached else "never in ")
                + f"{way.steps:g} steps at lr {way.lr:g}",
                plain / way.seconds if plain and way.reached else None,
            )

    def print(self) -> None:
        if not self.markdown:
            super().print()
            return
        for model in dict.fromkeys(model for model, _ in self.results.cases()):
            print("\n".join(markdown_table(self.results, model)), end="\n\n")
        if self.results.memory:
            print("\n".join(memory_table(self.results)), end="\n\n")
        if self.results.to_loss:
            print("\n".join(to_loss_table(self.results)), end="\n\n")

    def content(self) -> dict[str, Any]:
        content = asdict(self.results) | {"rows": [asdict(row) for row in self.rows]}
        for entry in content["times"]:
            entry["rate"] = words(entry["rate"])  # JSON knows no infinity
        return content

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw the ways to a loss, or seconds a step of each model: training-5M.png and more."""
        path = Path(path)
        if by_rate := self.results.ways():
            title = f"{self.title}; seconds of training to a test loss, bytes of Python's library"
            ways = {words(rate): ways for rate, ways in by_rate.items()}
            draw_ways(ways, title, path.with_stem(f"{path.stem}-to-loss"))
            return
        for model in dict.fromkeys(model for model, _ in self.results.cases()):
            panels = {
                words(rate): self.results.of(model, rate)
                for case_model, rate in self.results.cases()
                if case_model == model
            }
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


def markdown_table(results: Results, model: str) -> list[str]:
    """Return contenders by rates: seconds a step, and speed-up over plain DDP."""
    rates = [rate for case_model, rate in results.cases() if case_model == model]
    by_rate = [results.of(model, rate) for rate in rates]
    names = [name for name in CONTENDERS if any(name in times for times in by_rate)]
    rows = [[name, *(_cell(times, name) for times in by_rate)] for name in names]
    return table([called(model), *map(spoken, rates)], rows)


def memory_table(results: Results) -> list[str]:
    """Return contenders by models: MiB added to a rank by training."""
    models = [*dict.fromkeys(one.model for one in results.memory)]
    added = {(o.contender, o.model): f"{o.added_bytes / MIB:.0f}" for o in results.memory}
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
