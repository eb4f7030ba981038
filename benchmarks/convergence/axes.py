"""The axis of the test loss, or error, in all figures of convergence."""

from __future__ import annotations

from ..panels import Axes
from .tasks import TASKS

TICKS = [m * e for e in (0.01, 0.1, 1) for m in (1, 2, 3, 5)]


def loss_axis(axes: Axes, task: str) -> None:
    """Name what a task is measured by; of digits, whose losses differ most, on a log scale."""
    measure = TASKS[task].measure
    axes.set_ylabel(f"{measure.name}, {measure.unit}")
    if task == "digits":
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        ticks = [tick for tick in TICKS if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
