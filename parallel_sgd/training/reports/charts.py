"""Draw charts as SVG, for pages without scripts: lines, and stacked bars."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from ...palette import PALETTE
from .record import Points

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 116, 16, 44  #: margins; lines are labelled in the right one
TEXT_HEIGHT = 14
MOST_POINTS = 600  #: drawn per line
BAR, BAR_GAP = 14, 6


def line_chart(
    series: Mapping[str, Points], x_label: str, y_label: str, *, linear: bool = False
) -> str:
    """Return a chart of lines, each labelled at its end.

    The y axis is logarithmic if values are positive and differ by more than eight times, unless
    `linear`.

    Args:
        series: for every name, its points (x, y); at most six names.
        x_label, y_label: names of the axes, with units.
        linear: for a total that grows.
    """
    lines = {name: _thinned(points) for name, points in series.items() if points}
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    if not xs:
        return ""
    is_log = not linear and min(ys) > 0 and max(ys) > 8 * min(ys)
    scaled = math.log10 if is_log else float
    x_low, x_high = min(0, *xs), max(xs)
    x_ticks = _ticks(x_low, x_high)
    y_ticks = _log_ticks(min(ys), max(ys)) if is_log else _ticks(min(ys), max(ys))
    y_low, y_high = scaled(min(ys)), scaled(max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        right = (x - x_low) / ((x_high - x_low) or 1) * (WIDTH - LEFT - RIGHT)
        up = (scaled(y) - y_low) / ((y_high - y_low) or 1) * (HEIGHT - TOP - BOTTOM)
        return LEFT + right, HEIGHT - BOTTOM - up

    parts = [
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" '
        f'text-anchor="middle">{escape(x_label)}</text>',
        f'<text class="axis" transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) '
        f'rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]
    for tick in x_ticks:
        x, _ = place(tick, ys[0])
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{number(tick)}</text>"
        )
    for tick in y_ticks:
        _, y = place(x_low, tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>'
        )
    ends = {name: place(*points[-1]) for name, points in lines.items()}
    labels = _apart([y for _, y in ends.values()])
    for (name, points), colour, label in zip(lines.items(), PALETTE, labels, strict=False):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        x, y = ends[name]
        parts.append(f'<polyline stroke="{colour}" points="{path}"/>')
        parts.append(f'<circle fill="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')
        text = escape(_shortened(name, 17))
        parts.append(f'<text fill="{colour}" x="{x + 7:.1f}" y="{label + 4:.1f}">{text}</text>')
    return _svg(HEIGHT, parts, f"{y_label} against {x_label}")


def bar_chart(bars: Mapping[str, Mapping[str, float]], kinds: Sequence[str], unit: str) -> str:
    """Return a chart of horizontal stacked bars, with a line of keys above.

    Args:
        bars: for every bar's label, the lengths of its parts by kind.
        kinds: in the order of the parts; at most six.
        unit: of all lengths.
    """
    longest = max((sum(bar.values()) for bar in bars.values()), default=0) or 1
    left, top = 110, 26
    parts, x = [], float(left)
    for kind, colour in zip(kinds, PALETTE, strict=False):
        parts.append(
            f'<rect fill="{colour}" x="{x:.0f}" y="4" width="10" height="10"/>'
            f'<text x="{x + 14:.0f}" y="13">{escape(kind)}</text>'
        )
        x += 24 + 6.4 * len(kind)
    for i, (label, bar) in enumerate(bars.items()):
        y, x = top + i * (BAR + BAR_GAP), float(left)
        parts.append(
            f'<text x="{left - 8}" y="{y + 11}" text-anchor="end">'
            f"{escape(_shortened(label, 16))}</text>"
        )
        for kind, colour in zip(kinds, PALETTE, strict=False):
            length = bar.get(kind, 0.0) / longest * (WIDTH - left - 70)
            title = f"{label}: {kind} {number(bar.get(kind, 0.0))} {unit}"
            parts.append(
                f'<rect fill="{colour}" x="{x:.1f}" y="{y}" width="{length:.1f}" height="{BAR}">'
                f"<title>{escape(title)}</title></rect>"
            )
            x += length
        total = f"{number(sum(bar.values()))} {unit}"
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 11}">{total}</text>')
    return _svg(top + len(bars) * (BAR + BAR_GAP) + 4, parts, "time by rank")


def number(value: float) -> str:
    """Return a number as a short text: "0.015", "1.2k", "3.4M"."""
    size = abs(value)
    for least, factor, unit in (
        (1e12, 1e12, "T"),
        (1e9, 1e9, "G"),
        (1e6, 1e6, "M"),
        (1e4, 1e3, "k"),
    ):
        if size >= least:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}" if size >= 1 or not size else f"{value:.3g}"


def _svg(height: int, parts: Iterable[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _thinned(points: Points) -> Points:
    """Return at most `MOST_POINTS` finite points, the last among them."""
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    step = -(-len(points) // MOST_POINTS) or 1
    return points[::-step][::-1]


def _ticks(low: float, high: float) -> list[float]:
    """Return three to seven round numbers from `low` to `high`."""
    if high <= low:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (step * factor) <= 6)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers from `low` to `high`, evenly spread on a logarithmic axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for factors in ((1,), (1, 3), (1, 2, 5)):
        ticks = [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high]
        if len(ticks) >= 3:
            break
    return ticks or [low]


def _apart(heights: Sequence[float]) -> list[float]:
    """Return the heights of labels, moved apart so that none covers another."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    moved = list(heights)
    for before, i in itertools.pairwise(order):
        moved[i] = max(moved[i], moved[before] + TEXT_HEIGHT)
    moved[order[-1]] = min(moved[order[-1]], HEIGHT - BOTTOM)
    for after, i in itertools.pairwise(order[::-1]):
        moved[i] = min(moved[i], moved[after] - TEXT_HEIGHT)
    return moved
