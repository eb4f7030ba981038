"""The results as rows, as JSON, as the table that the README shows, and as figures."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from parallel_sgd import UserError
from parallel_sgd.command_line.units import bits_per_s
from parallel_sgd.files import write_whole

from ..report import Report, machine
from .contenders import CONTENDERS, HOOKS, PLAIN
from .figures import TIMES, draw_curves, draw_times
from .step_times import StepTime
from .to_loss import ToLoss


@dataclass
class Results:
    """
    Attributes:
        hosts: how many, with one rank each.
        machine: what they were emulated on, with the versions of both sides.
        times: of steps.
        runs: until a loss was reached.
    """

    hosts: int
    machine: dict[str, Any] = field(default_factory=machine)
    times: list[StepTime] = field(default_factory=list)
    runs: list[ToLoss] = field(default_factory=list)

    def cases(self) -> list[tuple[str, float]]:
        """Models and rates that were measured, in order."""
        return list(dict.fromkeys((time.model, time.rate) for time in self.times))

    def of(self, model: str, rate: float) -> dict[str, StepTime]:
        """Step times by contender, in the order of tables."""
        times = {t.contender: t for t in self.times if (t.model, t.rate) == (model, rate)}
        return {name: times[name] for name in CONTENDERS if name in times}


class Summary(Report):
    """A report whose rows come from the results.

    Args:
        results: what was measured.
        markdown: print the tables of the README, not the rows.
    """

    def __init__(self, results: Results, *, markdown: bool = False) -> None:
        super().__init__(
            f"Training on {results.hosts} emulated hosts, one rank and one thread each: "
            "ours beside PyTorch's DistributedDataParallel"
        )
        self.results, self.markdown = results, markdown
        for model, rate in results.cases():
            self._add_times(f"{model}, {words(rate)}", results.of(model, rate))
        self._add_runs(results.runs)

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

    def _add_runs(self, runs: Sequence[ToLoss]) -> None:
        plain = next((run.seconds for run in runs if run.contender == PLAIN), None)
        for run in runs:
            name = f"{words(run.rate)}, {run.contender}: to {run.target:g} nats"
            ratio = plain / run.seconds if plain and run.seconds else None
            seconds = run.curve[-1][0] if run.seconds is None else run.seconds
            said = f"never; {run.curve[-1][1]:.3f} nats after" if run.seconds is None else "after"
            reference = f"{PLAIN}, {plain:.3g} s" if plain else "not reached by DDP"
            self.add(name, seconds, "s", f"{reference}; {said} {run.steps} steps", ratio)

    def print(self) -> None:
        if not self.markdown:
            super().print()
            return
        for model in dict.fromkeys(model for model, _ in self.results.cases()):
            print("\n".join(markdown_table(self.results, model)), end="\n\n")

    def write(self, path: str | os.PathLike[str]) -> None:
        """The form of all benchmarks, and everything that was measured."""
        content = {**asdict(self.results), "rows": [asdict(row) for row in self.rows]}
        for entry in (*content["times"], *content["runs"]):
            entry["rate"] = words(entry["rate"])  # JSON knows no infinity
        text = json.dumps(content, indent=2) + "\n"
        write_whole("--json", path, lambda aside: aside.write_text(text))

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Several figures: training.png means training-5M.png, …, training-to-loss.png."""
        path = Path(path)
        for model in dict.fromkeys(model for model, _ in self.results.cases()):
            panels = {
                words(rate): self.results.of(model, rate)
                for case_model, rate in self.results.cases()
                if case_model == model
            }
            title = f"{self.title}; {model} parameters, seconds a step"
            draw_times(panels, title, path.with_name(f"{path.stem}-{model}{path.suffix}"))
        if self.results.runs:
            title = f"{self.title}; bytes of Python's library"
            draw_curves(self.results.runs, title, path.with_stem(f"{path.stem}-to-loss"))


def read(path: str) -> Results:
    """Results that `Summary.write` has written.

    Raises:
        UserError: the file holds something else.
    """
    try:
        content = json.loads(Path(path).read_text())
        for entry in (*content["times"], *content["runs"]):
            entry["rate"] = bits_per_s(entry["rate"])
        times = [StepTime(**entry) for entry in content["times"]]
        runs = [ToLoss(**entry) for entry in content["runs"]]
        return Results(content["hosts"], content["machine"], times, runs)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not the results of this benchmark: {error!r}") from None


def markdown_table(results: Results, model: str) -> list[str]:
    """Contenders by rates: seconds a step, and how many times as fast as plain DDP."""
    rates = [rate for case_model, rate in results.cases() if case_model == model]
    by_rate = [results.of(model, rate) for rate in rates]
    lines = [_line([f"{model} parameters", *map(spoken, rates)]), _line(["---"] * (len(rates) + 1))]
    for name in CONTENDERS:
        if any(name in times for times in by_rate):
            lines.append(_line([name, *(_cell(times, name) for times in by_rate)]))
    return lines


def _cell(times: dict[str, StepTime], name: str) -> str:
    if name not in times:
        return ""
    seconds = times[name].seconds
    text = f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.1f} s"
    if PLAIN in times and name != PLAIN:
        text += f", {times[PLAIN].seconds / seconds:.1f}{TIMES}"
    return text


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def words(rate: float) -> str:
    """A rate as command lines take it."""
    if math.isinf(rate):
        return "unlimited"
    return f"{rate / 1e9:g}gbit" if rate >= 1e9 else f"{rate / 1e6:g}mbit"


def spoken(rate: float) -> str:
    """A rate as people write it."""
    return words(rate).replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")
