"""The results as rows, as a table for people, and as figures."""

from __future__ import annotations

import os
from pathlib import Path

from ..report import Report
from ..statistics import Comparison
from .contenders import CONTENDERS
from .figures import FIGURES
from .study import Result, Results
from .tasks import TASKS

COLUMNS = (
    "",
    "K",
    "rates",
    "lr",
    "η",
    "gain",
    "loss",
    "less serial SGD",
    "",
    "peer",
    "less it",
    "",
)


class Summary(Report):
    """A report whose rows come from the results."""

    def __init__(self, results: Results) -> None:
        plan = results.plan
        super().__init__(f"Test loss in nats, {plan.seeds} seeds")
        self.results = results
        for task in plan.tasks:
            for result in results.of(task):
                self._add_result(result)

    def _add_result(self, result: Result) -> None:
        setting, results = result.setting, self.results
        serial, peer = results.serial(setting.task), results.peer(result)
        samples = results.plan.task(setting.task).samples
        name = f"{setting.task}, {label(result)}"
        loss, reference = result.final.mean(), serial.final.mean()
        self.add(
            f"{name}: test loss",
            loss,
            "nats",
            f"serial SGD, {reference:.4f}; {how(result)}; {samples} samples",
            loss / reference,
        )
        if result is not serial:
            self._add_comparison(f"{name}, less serial SGD", results.compare(result, serial))
        if peer:
            text = f"{name}, less {label(peer)}"
            self._add_comparison(text, results.compare(result, peer))
        if result.bytes_sent:
            sent = result.bytes_sent / setting.ranks
            task = results.plan.task(setting.task)
            steps = samples / (task.minibatch * setting.ranks)
            values = task.model(0).parameters.flat.size
            whole = steps * 2 * (setting.ranks - 1) / setting.ranks * values * 4
            self.add(
                f"{name}: sent by a rank",
                sent,
                "bytes",
                f"32 bits in every minibatch, {whole:.0f}; by all ranks {result.bytes_sent}",
                sent / whole,
            )

    def _add_comparison(self, name: str, comparison: Comparison) -> None:
        self.add(
            name, comparison.mean, "nats", f"{comparison}: {comparison.verdict}", comparison.reach
        )

    def print(self) -> None:
        """A line for every result; the rows are for files."""
        print(f"\n{self.title}")
        for name in self.results.plan.tasks:
            task = self.results.plan.task(name)
            print(
                f"\n{task.title}: {task.samples} samples, margin ±{task.margin:g}, "
                f"a rank's minibatch {task.minibatch}, blocks of {task.block} minibatches, "
                f"tuned on {task.tuning_seeds} other seeds"
            )
            cells = [COLUMNS, *(self._cells(result) for result in self.results.of(name))]
            widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
            for row in cells:
                texts = (
                    f"{text:>{width}}" if 0 < i < 7 else f"{text:{width}}"
                    for i, (text, width) in enumerate(zip(row, widths, strict=True))
                )
                print("  ".join(texts).rstrip())

    def _cells(self, result: Result) -> tuple[str, ...]:
        setting, results = result.setting, self.results
        serial, peer = results.serial(setting.task), results.peer(result)
        options = dict(setting.options)
        momentum = options.get("block_momentum")
        against_serial = _cells(results.compare(result, serial) if result is not serial else None)
        against_peer = _cells(results.compare(result, peer) if peer else None)
        return (
            CONTENDERS[setting.contender].title,
            str(setting.ranks),
            setting.rates,
            f"{setting.lr:g}{'*' if setting.at_edge else ''}",
            "" if momentum is None else f"{momentum:g}",
            f"{result.gain:g}",
            f"{result.final.mean():.4f}",
            *against_serial,
            label(peer) if peer else "",
            *against_peer,
        )

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Several figures: convergence.png means convergence-samples.png, convergence-….png."""
        path = Path(path)
        for name, draw in FIGURES.items():
            draw(self.results, path.with_name(f"{path.stem}-{name}{path.suffix}"))


def label(result: Result) -> str:
    """For example "block momentum, K=8, tuned"."""
    setting = result.setting
    ranks = f", K={setting.ranks}" if setting.ranks > 1 else ""
    return f"{CONTENDERS[setting.contender].title}{ranks}, {setting.rates}"


def how(result: Result) -> str:
    """Rate, options, gain, and what went wrong."""
    setting = result.setting
    edge = " (the last of the grid)" if setting.at_edge else ""
    texts = [f"lr {setting.lr:g}{edge}"]
    texts += [f"{name} {value:g}" for name, value in setting.options]
    texts.append(f"gain {result.gain:g}")
    ceiling = round(TASKS[setting.task].ceiling, 4)
    diverged = int((result.final >= ceiling).sum())
    if diverged:
        texts.append(f"{diverged} of {len(result.final)} diverged, counted as {ceiling}")
    return ", ".join(texts)


def _cells(comparison: Comparison | None) -> tuple[str, str]:
    if comparison is None:
        return "", ""
    low, high = comparison.interval_95
    return f"{comparison.mean:+.4f} ({low:+.4f} to {high:+.4f})", comparison.verdict
