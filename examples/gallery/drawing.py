"""The style of the gallery's figures: one size, one palette, and names at the ends of the lines."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

#: Okabe and Ito's colors, which color-blind readers can tell apart.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = PALETTE = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
)
GREY = "#666666"

INCHES, DPI = (7, 4), 110
LINE_POINTS = 12  #: the height of a line of text


def panels(columns: int = 1, *, title: str = "", inches: tuple[float, float] = INCHES) -> Any:
    """Make a figure: (figure, axes), or (figure, array of axes) with several columns.

    Matplotlib is imported here, on the rank that draws. A `Figure` needs no screen and no backend.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, dpi=DPI, layout="constrained")
    axes = figure.subplots(1, columns)
    for each in axes if columns > 1 else [axes]:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(color="#e6e6e6", linewidth=0.8)
        each.set_axisbelow(True)
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure, axes


def logarithmic(axes: Any, directions: str = "x") -> None:
    """Make the axes "x", "y" or "xy" logarithmic, with ticks such as 0.1, 0.2, 0.5 and 1."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for direction in directions:
        axes.set(**{f"{direction}scale": "log"})
        axis = getattr(axes, f"{direction}axis")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def label_ends(axes: Any, lines: Iterable[Any] | None = None, *, size: float = 9) -> None:
    """Write each line's label to the right of its last point, in its color, instead of a legend.

    Call this after the scales and limits are set: labels that would overlap are moved apart.

    Args:
        lines: of Matplotlib; None: all lines of the axes that have a label.
    """
    lines = axes.get_lines() if lines is None else lines
    axes.figure.draw_without_rendering()  # fixes limits and sizes
    points = 72 / axes.figure.dpi  # of a pixel
    ends = []
    for line in lines:
        if not line.get_label().startswith("_"):
            end = (line.get_xdata()[-1], line.get_ydata()[-1])
            ends.append((line, end, *(axes.transData.transform(end) * points)))
    for column in _columns(ends, size):
        heights = _apart([y for *_, y in column], LINE_POINTS)
        for (line, end, _, y), height in zip(column, heights, strict=True):
            axes.annotate(
                line.get_label(),
                end,
                xytext=(6, height - y),
                textcoords="offset points",
                color=line.get_color(),
                fontsize=size,
                va="center",
                annotation_clip=False,
            )


def _columns(ends: list[Any], size: float) -> list[list[Any]]:
    """Group ends whose labels might overlap, each group from the bottom to the top."""
    groups: list[list[Any]] = []
    right = -math.inf  # end of the labels so far
    for line, end, x, y in sorted(ends, key=lambda end: end[2]):
        if x > right:
            groups.append([])
        groups[-1].append((line, end, x, y))
        right = max(right, x + 10 + 0.7 * size * len(line.get_label()))
    return [sorted(group, key=lambda end: end[3]) for group in groups]


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Move sorted heights apart until neighbors differ by at least `least`."""
    groups: list[list[float]] = []  # of heights that touch each other
    starts: list[float] = []
    for height in heights:
        group, start = [height], height
        while groups and start < starts[-1] + len(groups[-1]) * least:
            group = groups.pop() + group
            starts.pop()
            start = sum(group) / len(group) - (len(group) - 1) * least / 2
        groups.append(group)
        starts.append(start)
    return [
        start + i * least
        for start, group in zip(starts, groups, strict=True)
        for i in range(len(group))
    ]


def mixed(*colors: str) -> Any:
    """Return a color map from the first color to the last."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("mixed", colors)


def save(figure: Any, path: str | Path) -> None:
    """Write a figure as PNG with at most 256 colors, in a third of the bytes of all colors."""
    from PIL import Image  # Matplotlib needs it too

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(256).save(path, format="PNG", optimize=True)
