"""The results as rows, as a table for people, and as figures."""

from __future__ import annotations

import os
from pathlib import Path

from ...report import DrawnReport, print_table
from ...statistics import Comparison
from ..tuning import Result, cells_of, uncompressed_bytes
from .contenders import CONTENDERS, gain
from .figures import FIGURES
from .study import Results

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


class Summary(DrawnReport):
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
            whole = uncompressed_bytes(results.plan.task(setting.task), setting.ranks)
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
            print_table(cells, numbers=range(1, 7))

    def _cells(self, result: Result) -> tuple[str, ...]:
        setting, results = result.setting, self.results
        serial, peer = results.serial(setting.task), results.peer(result)
        options = dict(setting.options)
        momentum = options.get("block_momentum")
        against_serial = cells_of(results.compare(result, serial) if result is not serial else None)
        against_peer = cells_of(results.compare(result, peer) if peer else None)
        return (
            CONTENDERS[setting.contender].title,
            str(setting.ranks),
            setting.rates,
            f"{setting.lr:g}{'*' if setting.at_edge else ''}",
            "" if momentum is None else f"{momentum:g}",
            f"{gain_of(result):g}",
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


def gain_of(result: Result) -> float:
    """What its algorithm does to a constant pseudo-gradient."""
    setting = result.setting
    return gain(CONTENDERS[setting.contender].algorithm(setting.options, 1), setting.ranks)


def how(result: Result) -> str:
    """Rate, options, gain, and what went wrong."""
    options = [f"{name} {value:g}" for name, value in result.setting.options]
    texts = [result.rate, *options, f"gain {gain_of(result):g}", result.diverged]
    return ", ".join(filter(None, texts))
