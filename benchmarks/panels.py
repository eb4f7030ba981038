"""Figures of several panels with a common title and legend."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from parallel_sgd.files import write_whole
from parallel_sgd.training import require_matplotlib

Axes = Any  #: matplotlib's
FilePath = str | os.PathLike[str]
Key = TypeVar("Key")


@contextmanager
def panels(
    titles: Mapping[Key, str],
    path: FilePath,
    title: str,
    *,
    columns: int = 2,
    size: tuple[float, float] = (5.5, 4.0),
    notes: Sequence[str] = (),
    legend: tuple[str, int] = ("outside lower center", 3),
    **shared: bool,
) -> Iterator[dict[Key, Axes]]:
    """Yield the axes of each panel by its key; write the figure at the end of the `with` block.

    Args:
        titles: of the panels, by key, in rows of at most `columns`.
        path: of the figure, in the format of its suffix, PNG without a suffix.
        size: of a panel, width and height in inches.
        notes: lines below the figure.
        legend: place of the common legend, and its number of columns.
        shared: `sharex` and `sharey` of matplotlib's `subplots`.
    """
    pyplot = require_matplotlib()
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    figure, grid = pyplot.subplots(
        *(rows, columns),
        figsize=(size[0] * columns, 1 + size[1] * rows),
        layout="constrained",
        squeeze=False,
        **shared,
    )
    try:
        for empty in grid.flat[len(titles) :]:
            empty.set_axis_off()
        by_key = dict(zip(titles, grid.flat, strict=False))
        for key, axes in by_key.items():
            axes.set_title(titles[key], loc="left", size=10)
            axes.grid(alpha=0.25)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title, x=0.01, horizontalalignment="left", size=10, wrap=True)
        yield by_key
        lines: dict[str, Any] = {}
        for axes in by_key.values():
            lines |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        where, ncols = legend[0], min(legend[1], 1 + columns)
        if lines:
            figure.legend(
                *(lines.values(), lines.keys()), loc=where, ncols=ncols, frameon=False, fontsize=9
            )
        figure.supxlabel("\n".join(notes), x=0.01, horizontalalignment="left", size=8)
        form = Path(path).suffix.removeprefix(".") or "png"
        write_whole("--figure", path, lambda aside: figure.savefig(aside, dpi=110, format=form))
    finally:
        pyplot.close(figure)


def plain_log(axis: Any, subs: Sequence[int] = (1, 2, 5)) -> None:
    """Give a logarithmic axis ticks, which are plain numbers, at these parts of each decade."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(ticker.NullFormatter())
