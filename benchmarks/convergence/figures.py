"""The figures of the studies, with a panel for each cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from parallel_sgd.command_line.units import rate_text

from ..panels import (
    COLORS,
    SMALL,
    Axes,
    Label,
    label_ends,
    label_points,
    link_words,
    panels,
    plain_log,
)
from ..statistics import bootstrap_interval, compare
from .cells import Cell
from .contenders import CONTENDERS
from .seconds import seconds_of
from .study import Figures, Groups, Result, find
from .task import Task
from .tasks import TASKS

SAMPLES = "thousands of samples, of all ranks"
TICKS = [m * e for e in (0.01, 0.1, 1) for m in (1, 2, 3, 5)]
MORE = "The table has more contenders."

#: The contenders of the figures of the first study.
BY_SAMPLES = ("serial", "32 bits", "1 bit", "averaging", "BMUF", "DiLoCo")
BY_BYTES = ("serial", "32 bits", "1 bit", "averaging", "BMUF", "BMUF 4 bits")


def by_samples(groups: Groups, path: Path, *, sent: bool = False) -> None:
    """Draw the test loss against samples, or bytes sent; then of serial SGD its end."""
    k = shown_ranks(groups)
    title = f"Test loss against {'bytes' if sent else 'samples'}: {k} ranks, tuned rates"
    with _panels(
        groups, path, f"{title}, mean of {{}} seeds", [MORE], columns=1 if sent else 2
    ) as grid:
        for task, results, axes in grid:
            labels, lines = [], []
            for result in results:
                line, contender = result.line, CONTENDERS[result.line.contender]
                if line.contender not in (BY_BYTES if sent else BY_SAMPLES):
                    continue
                if line.rates != contender.rates[0] or line.ranks not in (1, k):
                    continue
                x, (color, style) = _thousands(task, result), contender.style
                y = result.curves.mean(axis=0)
                if sent and result is results[0]:
                    axes.axhline(y[-1], color=color, lw=3, zorder=0)
                    how = {"transform": axes.get_yaxis_transform(), "size": SMALL, "va": "bottom"}
                    axes.text(0.01, y[-1], "serial SGD, at its end", color="#555555", **how)
                    continue
                if sent:
                    x = _parts(result) * result.mb_of_rank
                width = 3.0 if result is results[0] else 1.4
                lines += axes.plot(x, y, color=color, linestyle=style, linewidth=width)
                dark = "#777777" if color == COLORS["reference"] else color
                at = 0 if sent else -1  # the ends of lines against bytes are too near each other
                labels.append(Label(result.title, x[at], y[at], dark))
            if sent:
                axes.set_xscale("log")
                axes.set_xlim(axes.get_xlim()[0] / 6)
                plain_log(axes.xaxis, (1,))
            axes.set_xlabel("MB sent by a rank" if sent else SAMPLES)
            _loss_axis(axes, task)
            if sent:
                label_points(axes, labels, lines)
            else:
                label_ends(axes, labels)


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
    title = "Test loss after the same number of samples: mean and 95 % interval over seeds"
    with _panels(groups, path, title) as grid:
        for task, results, axes in grid:
            shown: set[int] = set()
            serial = results[0].final.mean()
            labels = []
            for i, (name, rates, style, marker) in enumerate(lines):
                of = (r for r in results if (r.line.contender, r.line.rates) == (name, rates))
                if not (points := list(of)):
                    continue
                means = np.array([result.final.mean() for result in points])
                ends = np.array([bootstrap_interval(result.final, 0.95) for result in points])
                x = np.array([result.line.ranks for result in points])
                shown |= set(x.tolist())
                x = x * 2 ** (0.06 * (i - 2))  # beside each other
                color = CONTENDERS[name].style[0]
                axes.errorbar(
                    *(x, means),
                    yerr=np.abs(ends.T - means),
                    color=color,
                    linestyle=style,
                    marker=marker,
                    markersize=3,
                    linewidth=1.4,
                    capsize=2,
                )
                labels.append(
                    Label(f"{CONTENDERS[name].title},\n{words[rates]}", x[-1], means[-1], color)
                )
            axes.axhline(serial, color=COLORS["reference"], lw=3, zorder=0)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(shown), map(str, sorted(shown)))
            axes.minorticks_off()
            axes.set_xlabel("K, ranks")
            _loss_axis(axes, task)
            labels.append(Label("serial SGD, tuned", axes.get_xlim()[1], serial, "#777777"))
            label_ends(axes, labels)


def error_feedback(groups: Groups, path: Path) -> None:
    """Draw the test loss of 32 bits, and of 1 bit with and without error feedback."""
    k = shown_ranks(groups)
    without = COLORS["no error feedback"]
    lines = (
        ("32 bits", "tuned", COLORS["32 bit"], "-", "32 bits"),
        ("1 bit", "as 32 bits", COLORS["1 bit"], "-", "1 bit"),
        ("1 bit without", "as 32 bits", without, "-", "1 bit without,\nrate of 32 bits"),
        ("1 bit without", "tuned", without, "--", "1 bit without,\ntuned rate"),
    )
    title = f"With and without error feedback: {k} ranks, mean and range of {{}} seeds"
    with _panels(groups, path, title) as grid:
        for task, results, axes in grid:
            labels = []
            for name, rates, color, style, text in lines:
                if result := find(results, name, k, rates):
                    x, curves = _thousands(task, result), result.curves
                    axes.plot(x, curves.mean(0), color=color, linestyle=style, linewidth=1.4)
                    ends = curves.min(0), curves.max(0)
                    axes.fill_between(x, *ends, color=color, alpha=0.1, linewidth=0)
                    labels.append(Label(text, x[-1], curves.mean(0)[-1], color))
            axes.set_xlabel(SAMPLES)
            _loss_axis(axes, task)
            label_ends(axes, labels)


def distance(groups: Groups, path: Path) -> None:
    """Draw the distance from 32 bits at the end, with its 95 % interval, against bits sent.

    A line joins the contenders with one step and an entropy code.
    """
    title = "Distance from 32 bits against bits sent: tuned rates, mean of {} seeds"
    notes = ["Joined: one step and an entropy code. Gray: the margin of equivalence. " + MORE]
    with _panels(groups, path, title, notes=notes) as grid:
        for task, (whole, *others), axes in grid:
            labels, marks, joined = [], [], []
            for result in others:
                bits = result.bits_sent(task)
                if bits and result.line.contender != "4-then-1":  # beside 1 bit
                    color, marker = CONTENDERS[result.line.contender].style
                    y, mark = _distance(axes, bits, result, whole, task, marker, color)
                    marks += mark
                    labels.append(Label(result.title, bits, y, color))
                    if result.line.contender in ENTROPY_CODED:
                        joined.append((bits, y))
            if joined:
                color = COLORS["reference"]
                marks += axes.plot(*zip(*sorted(joined), strict=True), color=color, lw=1, zorder=0)
            axes.axhspan(-task.margin, task.margin, color="black", alpha=0.08, linewidth=0)
            axes.set_xscale("log")
            axes.set_yscale("symlog", linthresh=2 * task.margin)
            high = axes.get_ylim()[1]
            axes.set_ylim(-1.5 * task.margin, 1.3 * high)
            ticks = [tick for tick in (-0.02, 0, 0.02, 0.05, 0.1, 0.2, 0.5, 1) if tick < 1.3 * high]
            axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            axes.set_xlim(axes.get_xlim()[0] / 1.2, 2 * axes.get_xlim()[1])
            plain_log(axes.xaxis)
            axes.set_xlabel("bits sent for each value")
            axes.set_ylabel(LESS)
            label_points(axes, labels, marks)


def frontier(groups: Groups, path: Path, *, rate: float = 0) -> None:
    """Draw the distance from 32 bits at the end against the bytes sent, a named point each.

    A line joins the best points: no other is as near to 32 bits with as few bytes.

    Args:
        rate: of links, in bits a second: against the seconds on these links instead.
    """
    of = f"seconds on {link_words(rate_text(rate))}" if rate else "bytes sent"
    title = f"Distance from 32 bits against {of}: mean of {{}} seeds"
    notes = [
        "Nearer to the lower left corner is better: the line joins the best points. "
        f"Gray: the margin of equivalence. Rates are tuned. {MORE}"
    ]
    with _panels(groups, path, title, notes=notes) as grid:
        for task, results, axes in grid:
            whole, labels, marks = results[0], [], []
            for result in results:
                if result.line.contender not in ON_FRONTIER:
                    continue
                x = seconds_of(result.run, rate) if rate else result.mb_of_rank
                color = CONTENDERS[result.line.contender].style[0]
                y, mark = _distance(axes, x, result, whole, task, "o", color)
                marks += mark
                labels.append(Label(result.title, x, y, color))
            axes.axhspan(-task.margin, task.margin, color="black", alpha=0.08, linewidth=0)
            best = _undominated([(label.x, label.y) for label in labels])
            marks += axes.plot(*zip(*best, strict=True), color="0.8", lw=1, zorder=0)
            axes.set_xscale("log")
            low, high = np.log10(axes.get_xlim())
            axes.set_xlim(10**low, 10 ** (high + 0.3 * (high - low)))
            plain_log(axes.xaxis, (1, 2, 5) if high - low < 2.3 else (1,))
            axes.set_xlabel("seconds of the run" if rate else "MB sent by a rank")
            axes.set_ylabel(LESS)
            label_points(axes, labels, marks)


LESS = "test loss less that of 32 bits, nats"
ENTROPY_CODED = ("4-entropy", "2", "1", "0.5", "0.25", "0.1")
ON_FRONTIER = (
    *("32", "4", "1", "0.25", "long BMUF", "long averaging", "long SparseLoCo"),
    *("long DiLoCo", "long DiLoCo 4", "long Streaming"),
)


def _distance(
    axes: Axes, x: float, result: Result, whole: Result, task: Task, marker: str, color: str
) -> tuple[float, list[Any]]:
    """Draw a point with its 95 % interval; return the distance from 32 bits, and the bar."""
    less = compare(result.final, whole.final, task.margin)
    low, high = less.interval_95
    bar = None if result is whole else [[less.mean - low], [high - less.mean]]
    drawn = axes.errorbar(
        x, less.mean, yerr=bar, color=color, marker=marker, markersize=4.5, linestyle="none"
    )
    return less.mean, [*drawn.lines[2]]


def _undominated(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points without another one to the left and below, from the left."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best


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
    groups: Groups, path: Path, title: str, notes: Sequence[str] = (), *, columns: int = 2
) -> Iterator[list[tuple[Task, Sequence[Result], Axes]]]:
    """Open a panel for each cell. {} in the title is the number of seeds."""
    titles: dict[Cell, str] = {cell: cell.title.replace(", K =", "\nK =") for cell in groups}
    seeds = len(next(iter(groups.values()))[0].final)
    with panels(
        titles, path, title.format(seeds), columns=columns, height=3.0, notes=notes
    ) as grid:
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
