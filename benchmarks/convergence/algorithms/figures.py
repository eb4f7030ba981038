"""The figures: loss against samples, bytes and ranks, and what error feedback is for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ...panels import Axes, FilePath, panels
from ...statistics import bootstrap_interval
from ..axes import loss_axis
from ..tasks import TASKS
from ..tuning import Result
from .contenders import CONTENDERS
from .study import Results

STYLES: dict[str, tuple[str, Any]] = {
    "serial": ("black", "-"),
    "serial Adam": ("black", ":"),
    "32 bits": ("#4878a8", "-"),
    "1 bit": ("#4878a8", "--"),
    "1 bit without": ("#cc4444", "-"),
    "averaging": ("#e08214", "-"),
    "BMUF": ("#2a8a4a", "-"),
    "averaging 1 bit": ("#e08214", "--"),
    "BMUF 1 bit": ("#2a8a4a", "--"),
    "BMUF 2 bits": ("#2a8a4a", "-."),
    "BMUF 4 bits": ("#2a8a4a", (0, (5, 1, 1, 1, 1, 1))),
    "BMUF entropy 1": ("#1abc9c", "-"),
    "BMUF entropy 0.25": ("#1abc9c", "--"),
    "classical": ("#8bc34a", "-"),
    "CNTK": ("#8bc34a", ":"),
    "SlowMo": ("#8e5ea2", "-"),
    "DiLoCo": ("#8c6d4f", "-"),
    "averaging entropy 1": ("#f7b267", "-"),
    "averaging entropy 0.25": ("#f7b267", "--"),
    "SlowMo entropy 1": ("#c39bd3", "-"),
    "SlowMo entropy 0.25": ("#c39bd3", "--"),
    "DiLoCo entropy 1": ("#c8a882", "-"),
    "DiLoCo entropy 0.25": ("#c8a882", "--"),
}


def ranks_to_show(results: Results) -> int:
    """The K of the figures that show one: 8, or the largest below, or else the smallest."""
    counts = {result.setting.ranks for result in results.all.values()} - {1}
    return max((k for k in counts if k <= 8), default=min(counts, default=1))


def samples(results: Results, path: FilePath) -> None:
    """Test loss against samples: everybody on one K, each with its best rates."""
    k = ranks_to_show(results)
    with _panels(
        results, path, f"K = {k}, tuned rates: mean of {results.plan.seeds} seeds"
    ) as grid:
        for task, axes in grid.items():
            x = _at(results, task)
            for result in _tuned(results, task, k):
                _plot(axes, x, result)
            axes.set_xlabel("thousands of samples, of all ranks")
            loss_axis(axes, task)


def bytes_sent(results: Results, path: FilePath) -> None:
    """Test loss against bytes: everybody who sends, on one K, each with its best rates."""
    k = ranks_to_show(results)
    with _panels(
        results, path, f"K = {k}, tuned rates: mean of {results.plan.seeds} seeds"
    ) as grid:
        for task, axes in grid.items():
            for result in _tuned(results, task, k):
                if result.setting.ranks == 1:
                    if result.setting.contender == "serial":
                        label = "serial SGD, at its end"
                        axes.axhline(result.final.mean(), color="black", lw=1, label=label)
                elif result.bytes_sent:
                    points = TASKS[task].points
                    part = np.arange(1, points + 1) / points
                    _plot(axes, part * result.bytes_sent / k / 1e6, result)
            axes.set_xscale("log")
            axes.set_xlabel("MB sent by a rank")
            loss_axis(axes, task)


def ranks(results: Results, path: FilePath) -> None:
    """Final test loss against K: model averaging and block momentum."""
    lines = (
        ("averaging", "equal", "--", "o"),
        ("averaging", "tuned", "-", "o"),
        ("BMUF", "equal", "--", "s"),
        ("BMUF", "gain 1", ":", "s"),
        ("BMUF", "tuned", "-", "s"),
    )
    words = {"equal": "rate of serial SGD", "gain 1": "gain 1", "tuned": "tuned"}
    title = "After the same number of samples: mean and 95 % interval over seeds"
    with _panels(results, path, title) as grid:
        for task, axes in grid.items():
            shown: set[int] = set()
            for i, (name, rates, style, marker) in enumerate(lines):
                points = [
                    result
                    for result in results.of(task)
                    if (result.setting.contender, result.setting.rates) == (name, rates)
                ]
                means = np.array([result.final.mean() for result in points])
                ends = np.array([bootstrap_interval(result.final, 0.95) for result in points])
                x = np.array([result.setting.ranks for result in points])
                shown |= set(x.tolist())
                if points:
                    axes.errorbar(
                        x * 2 ** (0.06 * (i - 2)),  # beside each other
                        means,
                        yerr=np.abs(ends.T - means),
                        color=STYLES[name][0],
                        linestyle=style,
                        marker=marker,
                        markersize=4,
                        capsize=3,
                        label=f"{CONTENDERS[name].title}, {words[rates]}",
                    )
            serial = results.serial(task).final.mean()
            axes.axhline(serial, color="black", lw=1, label="serial SGD, tuned")
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(shown), map(str, sorted(shown)))
            axes.minorticks_off()
            axes.set_xlabel("K, ranks")
            loss_axis(axes, task)


def error_feedback(results: Results, path: FilePath) -> None:
    """Test loss against samples: 32 bits, and 1 bit with and without error feedback."""
    k = ranks_to_show(results)
    lines = (
        ("32 bits", "tuned", "#4878a8", "-", "32 bits, tuned"),
        ("1 bit", "as 32 bits", "#2a8a4a", "-", "1 bit with error feedback, rate of 32 bits"),
        ("1 bit without", "as 32 bits", "#cc4444", "-", "1 bit without, rate of 32 bits"),
        ("1 bit without", "tuned", "#e08214", "-", "1 bit without, tuned"),
    )
    title = f"Data-parallel SGD, K = {k}: mean and range of {results.plan.seeds} seeds"
    with _panels(results, path, title) as grid:
        for task, axes in grid.items():
            x = _at(results, task)
            for name, rates, color, style, label in lines:
                result = results.all.get((task, name, k, rates))
                if result:
                    curves = result.curves
                    axes.plot(x, curves.mean(0), color=color, linestyle=style, label=label)
                    axes.fill_between(
                        x, curves.min(0), curves.max(0), color=color, alpha=0.15, linewidth=0
                    )
            axes.set_xlabel("thousands of samples, of all ranks")
            loss_axis(axes, task)


FIGURES: dict[str, Callable[[Results, FilePath], None]] = {
    "samples": samples,
    "bytes": bytes_sent,
    "ranks": ranks,
    "error-feedback": error_feedback,
}


def _panels(
    results: Results, path: FilePath, title: str
) -> AbstractContextManager[dict[str, Axes]]:
    """A panel for each task."""
    tasks = results.plan.tasks
    return panels({task: results.plan.task(task).title for task in tasks}, path, title)


def _tuned(results: Results, task: str, ranks: int) -> list[Result]:
    return [
        result
        for result in results.of(task)
        if result.setting.rates == CONTENDERS[result.setting.contender].rates
        and result.setting.ranks in (1, ranks)
        and result.setting.contender != "1 bit without"  # has a figure of its own, far above
    ]


def _plot(axes: Axes, x: Any, result: Result) -> None:
    name = result.setting.contender
    color, style = STYLES[name]
    label = CONTENDERS[name].title
    axes.plot(x, result.curves.mean(axis=0), color=color, linestyle=style, label=label)


def _at(results: Results, task: str) -> Any:
    points = TASKS[task].points
    return np.arange(1, points + 1) / points * results.plan.task(task).samples / 1000
