"""The style of the gallery's figures: one size, one palette, and names at the ends of the lines."""

from __future__ import annotations

import io
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


def label_ends(axes: Any, lines: Iterable[Any] | None = None, *, size: float = 9) -> None:
    """Write each line's label to the right of its last point, in its color, instead of a legend.

    Call this after the scales and limits are set: labels that would overlap are moved apart.

    Args:
        lines: of Matplotlib; None: all lines of the axes that have a label.
    """
    lines = axes.get_lines() if lines is None else lines
    named = [line for line in lines if not line.get_label().startswith("_")]
    axes.figure.draw_without_rendering()  # fixes limits and sizes
    ends = []
    for line in named:
        x, y = line.get_xdata()[-1], line.get_ydata()[-1]
        ends.append((axes.transData.transform((x, y))[1], x, y, line))
    ends.sort(key=lambda end: end[0])
    points = 72 / axes.figure.dpi
    heights = _apart([end[0] * points for end in ends], LINE_POINTS)
    for (pixel, x, y, line), height in zip(ends, heights, strict=True):
        axes.annotate(
            line.get_label(),
            (x, y),
            xytext=(6, height - pixel * points),
            textcoords="offset points",
            color=line.get_color(),
            fontsize=size,
            va="center",
            annotation_clip=False,
        )


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


def save(figure: Any, path: str | Path) -> None:
    """Write a figure as PNG with at most 256 colors, in a third of the bytes of all colors."""
    from PIL import Image  # Matplotlib needs it too

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(256).save(path, format="PNG", optimize=True)
