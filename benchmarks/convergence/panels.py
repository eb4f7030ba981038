"""Figures of several panels, with one legend for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, Generic, TypeVar

from parallel_sgd.training import require_matplotlib

from ..figures import save
from .tasks import TASKS

Path = str | PathLike[str]
Of = TypeVar("Of")

TICKS = [m * e for e in (0.01, 0.1, 1) for m in (1, 2, 3, 5)]


class Panels(Generic[Of]):
    """A `with` block gets (of what, matplotlib's axes) of each panel; written at the end.

    Args:
        titles: of the panels, by what they are of.
        columns: of panels, at most.
    """

    def __init__(
        self, titles: Mapping[Of, str], path: Path, title: str, *, columns: int = 2
    ) -> None:
        self.pyplot, self.path = require_matplotlib(), path
        columns = min(columns, len(titles))
        rows = -(-len(titles) // columns)
        self.figure, grid = self.pyplot.subplots(
            rows,
            columns,
            figsize=(5.5 * columns, 1 + 4 * rows),
            layout="constrained",
            squeeze=False,
        )
        self.figure.suptitle(title, size=11)
        for left_over in grid.flat[len(titles) :]:
            left_over.set_axis_off()
        self.panels = list(zip(titles, grid.flat, strict=False))
        for of, panel in self.panels:
            panel.set_title(titles[of], loc="left", size=10)
            panel.grid(alpha=0.25)
            for side in ("top", "right"):
                panel.spines[side].set_visible(False)

    def __enter__(self) -> Iterable[tuple[Of, Any]]:
        return self.panels

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            lines: dict[str, Any] = {}
            for _, axes in self.panels:
                lines |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
            self.figure.legend(
                lines.values(),
                lines.keys(),
                loc="outside lower center",
                ncols=3 if len(self.panels) > 1 else 2,
                frameon=False,
                fontsize=9,
            )
            save(self.figure, self.path)
        else:
            self.pyplot.close(self.figure)


def loss_axis(axes: Any, task: str) -> None:
    measure = TASKS[task].measure
    axes.set_ylabel(f"{measure.name}, {measure.unit}")
    if task == "digits":
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        ticks = [tick for tick in TICKS if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
