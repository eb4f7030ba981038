"""The figures of the studies, with a panel for each cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from parallel_sgd import SparseLoCo
from parallel_sgd.command_line.units import rate_text

from ..panels import Axes, panels, plain_log
from ..statistics import bootstrap_interval, compare
from .cells import Cell
from .contenders import CONTENDERS, LONG_BLOCK, LONG_BLOCKS
from .seconds import seconds_of
from .study import Figures, Groups, Result, find
from .task import Task
from .tasks import TASKS

SAMPLES = "thousands of samples, of all ranks"
LETTER, HEIGHT, GAP = 0.0145, 0.04, 0.02  #: of a point's name, in parts of the panel
TICKS = [m * e for e in (0.01, 0.1, 1) for m in (1, 2, 3, 5)]


def by_samples(groups: Groups, path: Path, *, sent: bool = False) -> None:
    """Draw the test loss against samples, or bytes sent; then of serial SGD its end."""
    k = shown_ranks(groups)
    with _panels(groups, path, f"K = {k}, tuned rates: mean of {{}} seeds") as grid:
        for task, results, axes in grid:
            for result in results:
                line, contender = result.line, CONTENDERS[result.line.contender]
                if line.rates != contender.rates[0] or line.ranks not in (1, k):
                    continue
                if line.contender == "1 bit without":  # has a figure of its own, far above
                    continue
                x, (color, style) = _thousands(task, result), contender.style
                if sent:
                    x = _parts(result) * result.bytes_sent / line.ranks / 1e6
                if not sent or result.bytes_sent:
                    y = result.curves.mean(axis=0)
                    axes.plot(x, y, color=color, linestyle=style, label=result.title)
                elif result is results[0]:
                    label = f"{result.title}, at its end"
                    axes.axhline(result.final.mean(), color="black", lw=1, label=label)
            if sent:
                axes.set_xscale("log")
            axes.set_xlabel("MB sent by a rank" if sent else SAMPLES)
            _loss_axis(axes, task)


def by_ranks(groups: Groups, path: Path) -> None:
    """Draw the final test loss against K: model averaging and block momentum."""
    lines = (
        ("averaging", "equal", "--", "o"),
        ("averaging", "tuned", "-", "o"),
        ("BMUF", "equal", "--", "s"),
        ("BMUF", "gain 1", ":", "s"),
        ("BMUF", "tuned", "-", "s"),
    )
    words = {"equal": "rate of serial SGD", "gain 1": "gain 1", "tuned": "tuned"}
    title = "After the same number of samples: mean and 95 % interval over seeds"
    with _panels(groups, path, title) as grid:
        for task, results, axes in grid:
            shown: set[int] = set()
            for i, (name, rates, style, marker) in enumerate(lines):
                of = (r for r in results if (r.line.contender, r.line.rates) == (name, rates))
                if not (points := list(of)):
                    continue
                means = np.array([result.final.mean() for result in points])
                ends = np.array([bootstrap_interval(result.final, 0.95) for result in points])
                x = np.array([result.line.ranks for result in points])
                shown |= set(x.tolist())
                axes.errorbar(
                    x * 2 ** (0.06 * (i - 2)),  # beside each other
                    means,
                    yerr=np.abs(ends.T - means),
                    color=CONTENDERS[name].style[0],
                    linestyle=style,
                    marker=marker,
                    markersize=4,
                    capsize=3,
                    label=f"{CONTENDERS[name].title}, {words[rates]}",
                )
            serial = results[0].final.mean()
            axes.axhline(serial, color="black", lw=1, label="serial SGD, tuned")
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(shown), map(str, sorted(shown)))
            axes.minorticks_off()
            axes.set_xlabel("K, ranks")
            _loss_axis(axes, task)


def error_feedback(groups: Groups, path: Path) -> None:
    """Draw the test loss of 32 bits, and of 1 bit with and without error feedback."""
    k = shown_ranks(groups)
    lines = (
        ("32 bits", "tuned", "#4878a8", "32 bits, tuned"),
        ("1 bit", "as 32 bits", "#2a8a4a", "1 bit with error feedback, rate of 32 bits"),
        ("1 bit without", "as 32 bits", "#cc4444", "1 bit without, rate of 32 bits"),
        ("1 bit without", "tuned", "#e08214", "1 bit without, tuned"),
    )
    title = f"Data-parallel SGD, K = {k}: mean and range of {{}} seeds"
    with _panels(groups, path, title) as grid:
        for task, results, axes in grid:
            for name, rates, color, text in lines:
                if result := find(results, name, k, rates):
                    x, curves = _thousands(task, result), result.curves
                    axes.plot(x, curves.mean(0), color=color, linestyle="-", label=text)
                    ends = curves.min(0), curves.max(0)
                    axes.fill_between(x, *ends, color=color, alpha=0.15, linewidth=0)
            axes.set_xlabel(SAMPLES)
            _loss_axis(axes, task)


def distance(groups: Groups, path: Path) -> None:
    """Draw the distance from 32 bits at the end, with its 95 % interval, against bits sent."""
    with _panels(groups, path, "Tuned rates: mean of {} seeds", columns=3) as grid:
        for task, (whole, *others), axes in grid:
            for result in others:
                if bits := result.bits_sent(task):
                    less = compare(result.final, whole.final, task.margin)
                    low, high = less.interval_95
                    color, marker = CONTENDERS[result.line.contender].style
                    axes.errorbar(
                        bits,
                        less.mean,
                        yerr=[[less.mean - low], [high - less.mean]],
                        color=color,
                        marker=marker,
                        linestyle="none",
                        label=result.title,
                    )
            axes.axhspan(-task.margin, task.margin, color="black", alpha=0.08)
            axes.set_xscale("log")
            axes.set_yscale("symlog", linthresh=2 * task.margin)
            axes.set_xlabel("bits sent for each value")
            axes.set_ylabel("test loss less that of 32 bits, nats")


def frontier(groups: Groups, path: Path, *, rate: float = 0) -> None:
    """Draw the distance from 32 bits at the end against the bytes sent, a named point each.

    A line joins the best points: no other is as near to 32 bits with as few bytes.

    Args:
        rate: of links, in bits a second: against the seconds on these links instead.
    """
    title = "Nearer to the lower left corner is better: tuned rates, mean of {} seeds"
    with _panels(groups, path, title) as grid:
        for task, (whole, *others), axes in grid:
            points = []
            for result in (whole, *others):
                less = compare(result.final, whole.final, task.margin)
                low, high = less.interval_95
                kind, color = _kind(result.line.contender)
                x, y = seconds_of(result.run, rate) if rate else result.mb_of_rank, less.mean
                bar = None if result is whole else [[y - low], [high - y]]
                axes.errorbar(x, y, yerr=bar, color=color, marker="o", linestyle="none", label=kind)
                points.append((x, y, result.title, color))
            axes.axhspan(-task.margin, task.margin, color="black", alpha=0.08)
            best = _undominated([(x, y) for x, y, *_ in points])
            axes.plot(*zip(*best, strict=True), color="0.8", lw=1, zorder=0)
            axes.set_xscale("log")
            _name_points(axes, points)
            decades = np.ptp(np.log10(axes.get_xlim()))
            plain_log(axes.xaxis, (1, 2, 5) if decades < 3 else (1,))
            axes.set_xlabel(
                f"seconds of the run on links of {rate_text(rate)}" if rate else "MB sent by a rank"
            )
            axes.set_ylabel("test loss less that of 32 bits, nats")


def _undominated(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points without another one to the left and below, from the left."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best


def _kind(contender: str) -> tuple[str, str]:
    """Return what a contender sends, for the legend, and its color."""
    if contender not in LONG_BLOCKS:
        return "a gradient in every step", "#4878a8"
    if LONG_BLOCKS[contender].make is SparseLoCo:
        return f"some values after {LONG_BLOCK} steps", "#cc4444"
    return f"all values after {LONG_BLOCK} steps", "#2a8a4a"


def _name_points(axes: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write the name of each point beside it, or above names that are in the way.

    Args:
        points: x, on a logarithmic axis, y, name and color.
    """
    from matplotlib.patheffects import withStroke

    places = np.array([(np.log10(x), y) for x, y, *_ in points])
    widths = np.array([LETTER * len(name) for _, _, name, _ in points])
    left = places[:, 0].min() - 0.1 * max(np.ptp(places[:, 0]), 1)
    wide = ((places[:, 0] - left) / (1 - GAP - widths)).max()  # so that every name ends inside
    bottom, top = axes.get_ylim()  # with the bars
    low, span = np.array([left, bottom]), np.array([wide, 1.05 * (top - bottom)])
    axes.set_xlim(*10.0 ** np.array([left, left + wide]))
    axes.set_ylim(bottom, bottom + span[1])
    taken: list[tuple[float, float, float]] = []  # left, right and bottom of names
    for i in np.argsort(places[:, 1]):
        _, _, name, color = points[i]
        left, at = (places[i] - low) / span + [GAP, GAP / 2]
        right = left + widths[i]
        while any(left < b and a < right and abs(y - at) < HEIGHT for a, b, y in taken):
            at += HEIGHT / 8
        taken.append((left, right, at))
        axes.annotate(
            name,
            points[i][:2],
            (left, at),
            textcoords="axes fraction",
            size=7,
            color=color,
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.4, "relpos": (0, 0.5)},
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )


#: By the name of the study.
FIGURES: dict[str, Figures] = {
    "algorithms": {
        "samples": by_samples,
        "bytes": partial(by_samples, sent=True),
        "ranks": by_ranks,
        "error-feedback": error_feedback,
    },
    "compression": {"distance": distance},
    "long-blocks": {
        "bytes": frontier,
        "10mbit": partial(frontier, rate=1e7),
        "100mbit": partial(frontier, rate=1e8),
        "1gbit": partial(frontier, rate=1e9),
    },
}


def shown_ranks(groups: Groups) -> int:
    """Return K of the figures that show one: 8, or the largest below, or else the smallest."""
    counts = {result.line.ranks for results in groups.values() for result in results} - {1}
    return max((k for k in counts if k <= 8), default=min(counts, default=1))


@contextmanager
def _panels(
    groups: Groups, path: Path, title: str, columns: int = 2
) -> Iterator[list[tuple[Task, Sequence[Result], Axes]]]:
    """Open a panel for each cell. {} in the title is the number of seeds."""
    titles: dict[Cell, str] = {cell: cell.title.replace(", K =", "\nK =") for cell in groups}
    seeds = len(next(iter(groups.values()))[0].final)
    with panels(titles, path, title.format(seeds), columns=columns) as grid:
        yield [(TASKS[cell.task], groups[cell], axes) for cell, axes in grid.items()]


def _thousands(task: Task, result: Result) -> Any:
    return _parts(result) * task.budget(result.line.ranks) / 1000


def _parts(result: Result) -> Any:
    """Return the part of a run that each point of a curve ends."""
    points = result.curves.shape[1]
    return np.arange(1, points + 1) / points


def _loss_axis(axes: Axes, task: Task) -> None:
    """Name the axis of losses, and set its scale."""
    axes.set_ylabel("test loss, nats")
    if task.log_scale:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        ticks = [tick for tick in TICKS if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
