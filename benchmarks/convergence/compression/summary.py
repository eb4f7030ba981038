"""The results as rows, as a table for people, and as figures."""

from __future__ import annotations

import os
from pathlib import Path

from ...report import DrawnReport, print_table
from ..task import LOSS, Measure
from ..tuning import Result, cells_of
from .contenders import CONTENDERS
from .figures import FIGURES, cell_title
from .study import Cell, Results

COLUMNS = ("", "bits sent", "lr", "a quarter in", "loss", "less 32 bits", "", "median")


class Summary(DrawnReport):
    """A report whose rows come from the results."""

    def __init__(self, results: Results) -> None:
        measures = dict.fromkeys(_measure(results, cell) for cell in results.cells)
        texts = ", ".join(f"{measure.name} in {measure.unit}" for measure in measures or [LOSS])
        super().__init__(f"{texts.capitalize()}, {results.plan.seeds} seeds")
        self.results = results
        for cell, by_name in results.cells.items():
            for name, result in by_name.items():
                self._add_result(cell, name, result)

    def _add_result(self, cell: Cell, name: str, result: Result) -> None:
        results = self.results
        task, measure = results.plan.task(cell.task), _measure(results, cell)
        title = f"{cell.task}, K={cell.ranks}, {cell.optimizer}, {CONTENDERS[name].title}"
        whole = results.cells[cell].get("32")
        texts = [result.rate, result.diverged, f"{task.steps_on(cell.ranks)} steps"]
        final, reference = result.final.mean(), whole.final.mean() if whole else None
        beside = f"32 bits, {reference:.4f}; " if reference else ""
        self.add(
            f"{title}: {measure.name}",
            final,
            measure.unit,
            beside + ", ".join(filter(None, texts)),
            final / reference if reference else None,
        )
        for point, values in enumerate(result.curves.T[:-1], 1):
            mean = whole.curves[:, point - 1].mean() if whole else None
            self.add(
                f"{title}: {measure.name} after {point}/{task.points}",
                values.mean(),
                measure.unit,
                f"32 bits, {mean:.4f}" if mean else "",
                values.mean() / mean if mean else None,
            )
        if comparison := results.compare(cell, name):
            self.add(
                f"{title}, less 32 bits",
                comparison.mean,
                measure.unit,
                f"{comparison}: {comparison.verdict}; median {comparison.median:+.4f}",
                comparison.reach,
            )
        if result.bytes_sent:
            bits = results.bits_sent(cell, result)
            self.add(
                f"{title}: sent",
                bits,
                "bits a value",
                f"32 bits; {result.bytes_sent} bytes by all ranks",
                bits / 32,
            )

    def print(self) -> None:
        """A line for every result; the rows are for files."""
        print(f"\n{self.title}")
        for cell, by_name in self.results.cells.items():
            task = self.results.plan.task(cell.task)
            print(
                f"\n{cell_title(task, cell)}: a rank's minibatch {task.minibatch}, margin "
                f"±{task.margin:g} {task.measure.unit}, tuned on {task.tuning_seeds} other seeds"
            )
            cells = [self._cells(cell, name, result) for name, result in by_name.items()]
            columns = [task.measure.name if text == "loss" else text for text in COLUMNS]
            print_table([columns, *cells], numbers=range(1, 5))

    def _cells(self, cell: Cell, name: str, result: Result) -> tuple[str, ...]:
        points, comparison = result.curves.shape[1], self.results.compare(cell, name)
        return (
            CONTENDERS[name].title,
            f"{self.results.bits_sent(cell, result):.2f}",
            f"{result.setting.lr:g}{'*' if result.setting.at_edge else ''}",
            f"{result.curves[:, points // 4 - 1].mean():.4f}",
            f"{result.final.mean():.4f}",
            *cells_of(comparison),
            f"{comparison.median:+.4f}" if comparison else "",
        )

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Several figures: convergence.png means convergence-samples.png, convergence-….png."""
        path = Path(path)
        if self.results.cells:
            for name, draw in FIGURES.items():
                draw(self.results, path.with_name(f"{path.stem}-{name}{path.suffix}"))


def _measure(results: Results, cell: Cell) -> Measure:
    return results.plan.task(cell.task).measure
