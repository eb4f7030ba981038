"""The figures: loss against samples and against bytes, a panel for each cell."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ...panels import Axes, FilePath, panels
from ..axes import loss_axis
from ..task import Task
from ..tasks import TASKS
from ..tuning import Result
from .contenders import CONTENDERS
from .study import Cell, Results

STYLES: dict[str, tuple[str, Any]] = {
    "32": ("black", "-"),
    "16": ("black", ":"),
    "4": ("#4878a8", "-"),
    "4-entropy": ("#2a8a4a", (0, (1, 3))),
    "2": ("#2a8a4a", (0, (5, 1, 1, 1, 1, 1))),
    "sign": ("#cc4444", "-"),
    "1": ("#2a8a4a", "-"),
    "0.5": ("#2a8a4a", "--"),
    "0.25": ("#2a8a4a", ":"),
    "0.1": ("#2a8a4a", "-."),
    "top-k": ("#e08214", "-"),
    "PowerSGD-1": ("#8e5ea2", "--"),
    "PowerSGD-4": ("#8e5ea2", "-"),
    "4-then-1": ("#8bc34a", "-"),
    "1-then-0.25": ("#8bc34a", ":"),
}

MARKERS = {"4-then-1": "^", "1-then-0.25": "^", "4": "s", "16": "s", "sign": "x", "top-k": "v"}
"""Of points without lines; entropy codes with one number of bits, and PowerSGD, have discs."""


def samples(results: Results, path: FilePath) -> None:
    """Test loss, or error, against samples."""
    with _panels(results, path) as grid:
        for cell, axes in grid.items():
            for name, result in results.cells[cell].items():
                _plot(axes, _parts(result) * _samples(results, cell) / 1000, name, result)
            axes.set_xlabel("thousands of samples, of all ranks")
            loss_axis(axes, cell.task)


def bytes_sent(results: Results, path: FilePath) -> None:
    """Test loss, or error, against bytes."""
    with _panels(results, path) as grid:
        for cell, axes in grid.items():
            for name, result in results.cells[cell].items():
                if result.bytes_sent:
                    sent = _parts(result) * result.bytes_sent / cell.ranks / 1e6
                    _plot(axes, sent, name, result)
            axes.set_xscale("log")
            axes.set_xlabel("MB sent by a rank")
            loss_axis(axes, cell.task)


def distance(results: Results, path: FilePath) -> None:
    """Distance from 32 bits at the end, with its 95 % interval, against bits that were sent."""
    with _panels(results, path) as grid:
        for cell, axes in grid.items():
            for name, result in results.cells[cell].items():
                comparison = results.compare(cell, name)
                if comparison is None or not result.bytes_sent:
                    continue
                low, high = comparison.interval_95
                axes.errorbar(
                    results.bits_sent(cell, result),
                    comparison.mean,
                    yerr=[[comparison.mean - low], [high - comparison.mean]],
                    color=STYLES[name][0],
                    marker=MARKERS.get(name, "o"),
                    linestyle="none",
                    label=CONTENDERS[name].title,
                )
            margin = TASKS[cell.task].margin
            axes.axhspan(-margin, margin, color="black", alpha=0.08)
            axes.set_xscale("log")
            axes.set_yscale("symlog", linthresh=2 * margin)
            axes.set_xlabel("bits sent for each value")
            measure = TASKS[cell.task].measure
            axes.set_ylabel(f"{measure.name} less that of 32 bits, {measure.unit}")


FIGURES: dict[str, Callable[[Results, FilePath], None]] = {
    "samples": samples,
    "bytes": bytes_sent,
    "distance": distance,
}


def _panels(results: Results, path: FilePath) -> AbstractContextManager[dict[Cell, Axes]]:
    plan = results.plan
    titles = {cell: cell_title(plan.task(cell.task), cell) for cell in results.cells}
    return panels(titles, path, f"Tuned rates: mean of {plan.seeds} seeds", columns=3)


def cell_title(task: Task, cell: Cell) -> str:
    return f"{task.title}, K = {cell.ranks}, {task.steps_on(cell.ranks)} steps of {cell.optimizer}"


def _samples(results: Results, cell: Cell) -> int:
    return results.plan.task(cell.task).budget(cell.ranks)


def _parts(result: Result) -> Any:
    """Of a run, at the end of which each point was taken."""
    points = result.curves.shape[1]
    return np.arange(1, points + 1) / points


def _plot(axes: Axes, x: Any, name: str, result: Result) -> None:
    color, style = STYLES[name]
    label = CONTENDERS[name].title
    axes.plot(x, result.curves.mean(axis=0), color=color, linestyle=style, label=label)
