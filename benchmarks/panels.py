"""Figures of several panels: one palette for all benchmarks, and labels beside lines and points.

A series is labelled in its color, next to its line or point, instead of in a legend. Figures are
`WIDTH` inches wide, so that their letters can be read at 700 pixels.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from parallel_sgd.files import write_whole
from parallel_sgd.training import require_matplotlib

Axes = Any  #: matplotlib's
FilePath = str | os.PathLike[str]
Key = TypeVar("Key")

WIDTH = 7.2  #: inches, of all panels of a row together
DPI = 200
SMALL = 7.5  #: points: labels, numbers at the axes and notes

COLORS = {
    # PyTorch's: warm
    "DDP": "#D55E00",
    "post-local SGD": "#E69F00",
    # a gradient in every step: black, and from light to dark blue the fewer bits
    "32 bit": "#000000",
    "16 bit": "#5A5A5A",
    "4 bit": "#56B4E9",
    "2 bit": "#2B93CE",
    "1 bit": "#0072B2",
    "0.5 bit": "#1B4F9C",
    "0.25 bit": "#332288",
    "0.1 bit": "#6A3D9A",
    "top-k": "#8C6D31",
    "PowerSGD": "#CC79A7",
    "no error feedback": "#CC3311",
    # local updates
    "block momentum": "#009E73",
    "model averaging": "#E69F00",
    "SlowMo": "#AA4499",
    "DiLoCo": "#882255",
    "SparseLoCo": "#999933",
    "DES-LOC": "#44AA99",
    "asynchronous": "#8C564B",
    # beside the contenders
    "reference": "#B5B5B5",
    "measured": "#3B5B7A",
    "also measured": "#B07D2B",
    "failed": "#CC3311",
}
"""The color of each contender in every figure: Okabe and Ito's colors and Paul Tol's, which people
with any color vision can tell apart. Post-local SGD is PyTorch's model averaging, and has the same
color."""


class Label(NamedTuple):
    """A text beside the point (x, y), in data coordinates."""

    text: str
    x: float
    y: float
    color: str


@contextmanager
def panels(
    titles: Mapping[Key, str],
    path: FilePath,
    title: str,
    *,
    columns: int = 2,
    height: float = 2.6,
    width: float = WIDTH,
    notes: Sequence[str] = (),
    **shared: Any,
) -> Iterator[dict[Key, Axes]]:
    """Yield the axes of each panel by its key; write the figure at the end of the `with` block.

    Args:
        titles: of the panels, by key, in rows of at most `columns`.
        path: of the figure, in the format of its suffix, PNG without a suffix.
        height, width: inches, of a panel and of the whole figure.
        notes: paragraphs below the figure.
        shared: `sharex`, `sharey` and `width_ratios` of matplotlib's `subplots`.
    """
    pyplot = require_matplotlib()
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    letters = int(width * 17.5)  # of a line
    below = [line for note in notes for line in textwrap.wrap(note, letters)]
    above = textwrap.wrap(title, int(0.7 * letters))  # bold
    size = width, height * rows + 0.15 * (len(above) + len(below))
    with pyplot.rc_context({"font.size": SMALL + 0.5, "axes.labelsize": SMALL + 0.5}):
        figure, grid = pyplot.subplots(
            *(rows, columns), figsize=size, dpi=DPI, layout="constrained", squeeze=False, **shared
        )
    try:
        for empty in grid.flat[len(titles) :]:
            empty.set_axis_off()
        by_key = dict(zip(titles, grid.flat, strict=False))
        for key, axes in by_key.items():
            axes.set_title(titles[key], loc="left", size=SMALL + 1)
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=SMALL)
        left = {"x": 0.01, "horizontalalignment": "left"}
        figure.suptitle("\n".join(above), size=9, weight="bold", **left)
        if below:
            figure.supxlabel("\n".join(below), size=SMALL - 0.5, color="#444444", **left)
        yield by_key
        form = Path(path).suffix.removeprefix(".") or "png"
        write_whole("--figure", path, lambda aside: figure.savefig(aside, format=form))
    finally:
        pyplot.close(figure)


def label_ends(axes: Axes, labels: Sequence[Label]) -> None:
    """Write labels at the right of the panel, at the height of the lines' ends.

    Labels that would overlap are moved apart, and joined with their lines' ends. The axes' limits
    and scales must be final.
    """
    import numpy as np

    axes.figure.draw_without_rendering()
    pixels = axes.figure.dpi / 72
    box = axes.get_window_extent()
    order = sorted(labels, key=lambda label: label.y)
    ends = axes.transData.transform([(label.x, label.y) for label in order])
    line_height = 1.3 * SMALL * pixels
    heights = np.array([line_height * (1 + label.text.count("\n")) for label in order])
    middle = np.clip(ends[:, 1], box.y0, box.y1)
    places = spread(middle, (heights[:-1] + heights[1:]) / 2)
    places += min(0.0, box.y1 + line_height - places.max(initial=-np.inf))
    for label, end, place in zip(order, ends, places, strict=True):
        joined = abs(place - end[1]) > line_height / 3 or box.x1 - end[0] > 3 * line_height
        line = {"arrowstyle": "-", "color": label.color, "lw": 0.5, "shrinkA": 1, "shrinkB": 1}
        axes.annotate(
            label.text,
            (label.x, label.y),
            (1.04, (place - end[1]) / pixels),
            textcoords=("axes fraction", "offset points"),
            color=label.color,
            size=SMALL,
            va="center",
            annotation_clip=False,
            arrowprops={**line, "relpos": (0, 0.5)} if joined else None,
        )


def spread(places: Sequence[float], apart: Sequence[float]) -> Any:
    """Return the nearest places that are far enough apart, by least squares, in order.

    Args:
        places: in rising order.
        apart: the least distance of each place from the next one.

    >>> [float(place) for place in spread([0.0, 1.0, 10.0], [3.0, 3.0])]
    [-1.0, 2.0, 10.0]
    """
    import numpy as np

    offsets = np.concatenate([[0.0], np.cumsum(apart)])
    groups: list[tuple[float, int]] = []  # mean and number of places less their offsets
    for place, offset in zip(places, offsets, strict=True):
        mean, count = place - offset, 1
        while groups and groups[-1][0] > mean:
            before, more = groups.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        groups.append((mean, count))
    means, counts = zip(*groups, strict=True)
    return np.repeat(np.array(means), np.array(counts)) + offsets


def label_points(
    axes: Axes, labels: Sequence[Label], avoid: Sequence[Any] = (), *, radius: float = 3.5
) -> None:
    """Write a label beside each point, clear of all points and of the labels before.

    A label that stands away from its point is joined with it. The axes' limits and scales must be
    final.

    Args:
        avoid: matplotlib's lines and other artists that no label should cover.
        radius: of the points' markers, in typographic points.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()
    pixels = axes.figure.dpi / 72
    ends = axes.transData.transform([(label.x, label.y) for label in labels])
    mark, gap = radius * pixels, radius + 2.5
    taken = [Bbox([end - mark, end + mark]) for end in ends]
    lines: list[Any] = []
    for artist in avoid:
        boxes = _boxes(artist)
        is_marker = len(boxes) == 1 and hasattr(artist, "get_marker")
        (taken if is_marker else lines).extend(boxes)
    pairs = sorted(zip(labels, ends, strict=True), key=lambda pair: (-pair[1][1], -pair[1][0]))
    for label, end in pairs:
        text = axes.annotate(
            label.text,
            (label.x, label.y),
            (0, 0),
            textcoords="offset points",
            color=label.color,
            size=SMALL,
            va="center",
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )
        extent = text.get_window_extent()
        width, centered = extent.width / pixels, -extent.width / pixels / 2
        best_cost, best, best_box = math.inf, (gap, 0.0), extent
        for x in (gap, centered, -gap - width):
            for y in _heights():
                left, middle = end[0] + x * pixels, end[1] + y * pixels
                bottom = middle - extent.height / 2
                box = Bbox.from_bounds(left, bottom, extent.width, extent.height)
                cost = abs(y) + 5 * (x != gap) + _cost(box, axes.get_window_extent(), taken, lines)
                if cost < best_cost:
                    best_cost, best, best_box = cost, (x, y), box
        text.set_position(best)
        taken.append(best_box)
        x, y = best
        if abs(y) > (1.7 if x == centered else 1) * SMALL:
            line = {"arrowstyle": "-", "color": label.color, "lw": 0.5, "shrinkA": 0, "shrinkB": 3}
            edge = {gap: gap, centered: 0.0}.get(x, -gap), y
            axes.annotate("", (label.x, label.y), edge, textcoords="offset points", arrowprops=line)


def _cost(box: Any, inside: Any, taken: Sequence[Any], lines: Sequence[Any]) -> float:
    """Return the cost of a label's place in points: what it covers, and whether it is outside."""
    hidden: int = sum(map(box.overlaps, taken))
    crossed: int = sum(map(box.overlaps, lines))
    padded = box.padded(4)
    within = all(map(inside.contains, (padded.x0, padded.x1), (padded.y0, padded.y1)))
    return 1000.0 * hidden + 5000.0 * (not within) + min(5.0 * crossed, 50.0)


def _boxes(artist: Any) -> list[Any]:
    """Return boxes around an artist: along a line small ones, around a single marker one."""
    import numpy as np
    from matplotlib.lines import Line2D
    from matplotlib.transforms import Bbox

    if not isinstance(artist, Line2D):
        return [artist.get_window_extent()]
    corners = artist.get_transform().transform(artist.get_xydata())
    if len(corners) == 1:
        return [
            Bbox([corners[0], corners[0]]).padded(artist.get_markersize() * artist.figure.dpi / 144)
        ]
    parts = np.linspace(corners[:-1], corners[1:], 20).reshape(-1, 2)
    return [Bbox([point - 1, point + 1]) for point in parts]


def _heights() -> list[float]:
    """Return heights of labels over their points, in points, the nearest first."""
    return [0.0, *(sign * 2.0 * i for i in range(1, 40) for sign in (1, -1))]


def link_words(rate: str) -> str:
    """Return the links of a rate, written as `rate_text` does, for people.

    >>> link_words("10mbit"), link_words("unlimited")
    ('links of 10 Mbit/s', 'links without a limit')
    """
    for unit, words in (("kbit", "kbit/s"), ("mbit", "Mbit/s"), ("gbit", "Gbit/s")):
        if rate.endswith(unit):
            return f"links of {rate.removesuffix(unit)} {words}"
    return "links without a limit"


def plain_log(axis: Any, subs: Sequence[int] = (1, 2, 5)) -> None:
    """Give a logarithmic axis ticks, which are plain numbers, at these parts of each decade."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(ticker.NullFormatter())
