"""Figures: speed-up against accuracy, and samples a second against workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..panels import COLORS, SMALL, Axes, Label, label_ends, label_points, panels, plain_log
from .contenders import CONTENDERS, SERIAL
from .results import Point, Predicted, Results, Spread

Line = tuple[tuple[int, float], ...]  #: workers and samples a second

#: The contenders that are drawn. Those left out are as fast as block momentum.
DRAWN = (SERIAL, "4 bit", "1 bit", "PowerSGD rank 4", "block momentum", "asynchronous")
SHOWN = 0.6  #: of the best accuracy: points below are named, and the axis not stretched for them


def draw(results: Results, title: str, notes: Sequence[str], path: Path) -> None:
    """Draw both panels, with notes below."""
    titles = {
        "learning": "(a) accuracy and speed-up after the same samples; in the markers: workers",
        "scaling": "(b) samples/s: measured (solid, with bars), planned (dashed)",
    }
    points = [point for point in results.points() if point.contender in DRAWN]
    with panels(titles, path, title, columns=1, height=3.4, notes=notes) as axes:
        _learning(axes["learning"], points)
        _scaling(axes["scaling"], points, [p for p in results.predicted if p.contender in DRAWN])


def _learning(axes: Axes, points: Sequence[Point]) -> None:
    """Draw average speed-up as a large marker with the number of workers, peak as a small one."""
    best = max((p.accuracy.middle for p in points if p.accuracy), default=0.0)
    low = [p for p in points if p.accuracy and p.accuracy.middle < SHOWN * best]
    points = [p for p in points if p not in low]
    labels, bars = [], []
    for name, contender in CONTENDERS.items():
        color = contender.color
        those = [(p, p.accuracy) for p in points if p.contender == name and p.accuracy]
        parallel = [(p, accuracy) for p, accuracy in those if p.workers > 1]
        line = [(p.average.middle, accuracy.middle) for p, accuracy in parallel]
        if line:
            axes.plot(*zip(*line, strict=True), color=color, linewidth=0.8, alpha=0.5, zorder=1)
            labels.append(Label(name, parallel[-1][0].peak, line[-1][1], color))
        for p, accuracy in parallel:
            x, y = p.average.middle, accuracy.middle
            bars += axes.plot([x, p.peak], [y, y], ":", color=color, linewidth=1, zorder=2)
            axes.plot(p.peak, y, "o", color=color, fillstyle="none", markersize=4, zorder=3)
            spreads = {"xerr": _bars([p.average]), "yerr": _bars([accuracy])}
            point = axes.errorbar(x, y, fmt="o", color=color, markersize=9, elinewidth=1, **spreads)
            bars += [point.lines[0], *point.lines[2]]
            how = {"ha": "center", "va": "center_baseline", "zorder": 5, "color": "white"}
            axes.text(x, y, str(p.workers), size=SMALL - 1, **how)
        for p, accuracy in those:
            if p.workers == 1:
                y, place = accuracy.middle, axes.get_yaxis_transform()
                axes.axhline(y, color=COLORS["reference"], linewidth=3, zorder=0)
                how = {"ha": "right", "va": "bottom", "size": SMALL, "color": "#555555"}
                axes.text(0.99, y, "serial SGD", transform=place, **how)
    if low:
        names = "\n".join(f"{p.contender}, {p.workers} workers" for p in low)
        text = f"below {SHOWN * best:.0f} %:\n{names}"
        axes.text(0.01, 0.03, text, transform=axes.transAxes, size=SMALL)
    axes.margins(0.06)
    axes.set_xlim(0, 1.15 * axes.get_xlim()[1])
    axes.set_xlabel("speed-up over serial SGD: average (filled), peak (hollow)")
    axes.set_ylabel("accuracy, % of the test bytes")
    if labels:
        label_points(axes, labels, bars, radius=5)


def _scaling(axes: Axes, points: Sequence[Point], predicted: Sequence[Predicted]) -> None:
    """Draw measured rates solid with bars, planned rates dashed."""
    (serial,) = (p.samples_per_s.middle for p in points if (p.contender, p.workers) == (SERIAL, 1))
    workers = sorted({*(p.workers for p in points), *(one.workers for one in predicted)})
    ideal = [k * serial for k in workers]
    axes.plot(workers, ideal, color=COLORS["reference"], linewidth=4, alpha=0.5, zorder=0)
    labels = [Label("ideal", workers[-1], ideal[-1], "#777777")]
    unplanned = []
    dashed = _dashed(predicted)
    for i, (name, contender) in enumerate(CONTENDERS.items()):
        color = contender.color
        those = [p for p in points if p.contender == name]
        if not those:
            continue
        aside = 2 ** (0.025 * (i - len(CONTENDERS) // 2))  # beside each other
        spreads = [p.samples_per_s for p in those]
        x, y = [p.workers * aside for p in those], [spread.middle for spread in spreads]
        how = {"color": color, "marker": "o", "markersize": 3.5, "linewidth": 1.4, "capsize": 2}
        axes.errorbar(x, y, yerr=_bars(spreads), elinewidth=1, zorder=3, **how)
        if name in dashed:
            line, style = dashed[name]
            axes.plot(*zip(*line, strict=True), color=color, linestyle=style, linewidth=1.4)
            labels.append(Label(name, *line[-1], color))
        else:
            unplanned.append(Label(f"{name} (not planned)", x[-1], y[-1], color))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(workers, [f"{k}" for k in workers])
    plain_log(axes.yaxis)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.minorticks_off()
    axes.set_xlabel("workers")
    axes.set_ylabel("samples/s of all workers, in steps")
    label_ends(axes, labels)
    if unplanned:
        label_points(axes, unplanned)


def _dashed(predicted: Sequence[Predicted]) -> dict[str, tuple[Line, Any]]:
    """Return every planned line with its dashes. Equal lines fill each other's gaps."""
    lines: dict[str, Line] = {}
    for one in predicted:
        lines[one.contender] = (*lines.get(one.contender, ()), (one.workers, one.samples_per_s))
    dashed = {}
    for name, line in lines.items():
        equal = [other for other in lines if lines[other] == line]
        gap = 4.0 * max(1, len(equal) - 1)
        dashed[name] = line, (4.0 * equal.index(name), (4.0, gap))
    return dashed


def _bars(spreads: Sequence[Spread]) -> list[list[float]]:
    """Return the distances of least and largest from the middle: [2, points]."""
    return [[s.middle - s.low for s in spreads], [s.high - s.middle for s in spreads]]
