"""Two panels: speed-up against accuracy, and samples a second against workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..panels import Axes, panels, plain_log
from .contenders import CONTENDERS, SERIAL
from .results import Point, Predicted, Results, Spread

Line = tuple[tuple[int, float], ...]  #: workers and samples a second

IDEAL = "#999999"
SHOWN = 0.6  #: of the best accuracy: who has less is named, and the axis not stretched for them


def draw(results: Results, title: str, notes: Sequence[str], path: Path) -> None:
    """Draw both panels, with notes below."""
    titles = {
        "learning": "(a) speed-up and accuracy, after the same samples",
        "scaling": "(b) samples/s: measured (solid), planned (dashed)",
    }
    points, legend = results.points(), ("outside right upper", 1)
    with panels(titles, path, title, size=(7.5, 6.5), notes=notes, legend=legend) as axes:
        _learning(axes["learning"], points)
        _scaling(axes["scaling"], points, results.predicted)


def _learning(axes: Axes, points: Sequence[Point]) -> None:
    """Draw average speed-up as a large marker with the number of workers, peak as a small one."""
    best = max((p.accuracy.middle for p in points if p.accuracy), default=0.0)
    low = [p for p in points if p.accuracy and p.accuracy.middle < SHOWN * best]
    points = [p for p in points if p not in low]
    for i, (name, contender) in enumerate(CONTENDERS.items()):
        color, marker = contender.style
        those = [(p, p.accuracy) for p in points if p.contender == name and p.accuracy]
        parallel = [(p, accuracy) for p, accuracy in those if p.workers > 1]
        line = [(p.average.middle, accuracy.middle) for p, accuracy in parallel]
        if line:
            axes.plot(*zip(*line, strict=True), color=color, linewidth=0.8, alpha=0.5, zorder=1)
        for p, accuracy in parallel:
            x, y = p.average.middle, accuracy.middle
            axes.plot([x, p.peak], [y, y], ":", color=color, linewidth=1, zorder=2)
            axes.plot(p.peak, y, marker, color=color, fillstyle="none", markersize=5, zorder=3)
            bars = {"xerr": _bars([p.average]), "yerr": _bars([accuracy])}
            how = {"color": color, "markersize": 7, "elinewidth": 1}
            axes.errorbar(x, y, fmt=marker, capsize=2, zorder=4, **bars, **how)
            angle = 2 * math.pi * (i + 0.5) / len(CONTENDERS)  # points may coincide
            axes.annotate(
                str(p.workers),
                (x, y),
                xytext=(11 * math.cos(angle), 11 * math.sin(angle)),
                textcoords="offset points",
                ha="center",
                va="center",
                color=color,
                fontsize=9,
                zorder=5,
            )
        for p, accuracy in those:
            if p.workers == 1:
                y, place = accuracy.middle, axes.get_yaxis_transform()
                axes.axhline(y, color=IDEAL, linewidth=1, linestyle="--", zorder=0)
                how = {"color": "black", "markersize": 9, "markerfacecolor": "white"}
                axes.errorbar(1, y, yerr=_bars([accuracy]), fmt="o", capsize=2, zorder=4, **how)
                how = {"ha": "right", "va": "bottom", "fontsize": 9, "color": "#555555"}
                axes.text(0.99, y, "serial SGD", transform=place, **how)
    if low:
        names = "\n".join(f"{p.contender}, {p.workers} workers" for p in low)
        text = f"below {SHOWN * best:.0f} %:\n{names}"
        axes.text(0.01, 0.01, text, transform=axes.transAxes, fontsize=9)
    axes.set_xlim(0)
    axes.set_xlabel("speed-up over serial SGD: average (filled), peak (hollow); numbers: workers")
    axes.set_ylabel("accuracy of the next byte, % of the test set")


def _scaling(axes: Axes, points: Sequence[Point], predicted: Sequence[Predicted]) -> None:
    """Draw measured rates solid with markers, planned rates dashed."""
    (serial,) = (p.samples_per_s.middle for p in points if (p.contender, p.workers) == (SERIAL, 1))
    workers = sorted({*(p.workers for p in points), *(one.workers for one in predicted)})
    ideal = [k * serial for k in workers]
    axes.plot(workers, ideal, color=IDEAL, linewidth=4, alpha=0.4, zorder=0, label="ideal")
    axes.plot([], [], color="black", linestyle="--", linewidth=1.4, label="the planner's")
    dashed = _dashed(predicted)
    for i, (name, contender) in enumerate(CONTENDERS.items()):
        color, marker = contender.style
        those = [p for p in points if p.contender == name]
        aside = 2 ** (0.025 * (i - len(CONTENDERS) // 2))  # beside each other
        spreads = [p.samples_per_s for p in those]
        axes.errorbar(
            [p.workers * aside for p in those],
            [spread.middle for spread in spreads],
            yerr=_bars(spreads),
            label=name if those else None,
            **{"color": color, "marker": marker, "markersize": 6, "linewidth": 1.4},
            **{"capsize": 2, "elinewidth": 1, "zorder": 3},
        )
        if name in dashed:
            line, style = dashed[name]
            axes.plot(*zip(*line, strict=True), color=color, linestyle=style, linewidth=1.4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(workers, [f"{k}" for k in workers])
    plain_log(axes.yaxis)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.minorticks_off()
    axes.set_xlabel("workers")
    axes.set_ylabel("samples/s of all workers, in steps")


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
