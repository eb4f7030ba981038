"""Bars of seconds a step, ours and theirs in two colours, and seconds to a test loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from parallel_sgd.training import require_matplotlib

from ..figures import plain_log, save
from .contenders import CONTENDERS, PLAIN
from .step_times import StepTime
from .to_loss import ToLoss

TIMES = "\N{MULTIPLICATION SIGN}"
OURS, THEIRS, LIMIT = "#2f6da8", "#d08a3c", "#b8b8b8"


def draw_times(panels: Mapping[str, Mapping[str, StepTime]], title: str, path: Path) -> None:
    """A panel for each rate, a bar for each contender, with its seconds and against plain DDP."""
    pyplot = require_matplotlib()
    names = [name for name in CONTENDERS if any(name in times for times in panels.values())][::-1]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(
        rows,
        columns,
        figsize=(6.5 * columns, rows * (0.28 * len(names) + 0.9) + 0.9),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for axes, (rate, times) in zip(grid.flat, panels.items(), strict=False):
        plain = times.get(PLAIN)
        longest = max(time.seconds for time in times.values())
        axes.set_xlim(0, 1.3 * longest)
        axes.set_yticks(range(len(names)), names)
        for y, name in enumerate(names):
            if name not in times:
                continue
            seconds = times[name].seconds
            axes.barh(y, seconds, color=_color(name))
            text = f" {seconds:.3g} s"
            if plain and name != PLAIN:
                text += f", {plain.seconds / seconds:.1f}{TIMES}"
            axes.text(seconds, y, text, va="center", size=8)
        axes.set_title(f"links: {rate}", loc="left", size=10)
        axes.set_xlabel("seconds a step")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    patch = pyplot.Rectangle
    figure.legend(
        [patch((0, 0), 1, 1, color=color) for color in (OURS, THEIRS, LIMIT)],
        ["ours", "PyTorch", "either without communication"],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(title, x=0.01, horizontalalignment="left", size=10, wrap=True)
    save(figure, path)


def draw_ways(panels: Mapping[str, Sequence[ToLoss]], title: str, path: Path) -> None:
    """A panel for each rate: seconds to every loss that a contender has reached, a line each."""
    pyplot = require_matplotlib()
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(4.5 * len(panels), 5.5), layout="constrained", squeeze=False
    )
    for axes, (rate, ways) in zip(grid.flat, panels.items(), strict=True):
        names = list(dict.fromkeys(way.contender for way in ways))
        colors = pyplot.get_cmap("tab20").colors
        for name, color in zip(names, colors, strict=False):
            points = [
                (way.seconds, way.target) for way in ways if way.contender == name and way.reached
            ]
            style = "-o" if CONTENDERS[name].ours else "--s"
            axes.plot(*zip(*points, strict=True) if points else ([], []), style, color=color)
        axes.set_title(f"links: {rate}", loc="left", size=10)
        axes.set_xlabel("seconds of training")
        axes.set_xscale("log")
        plain_log(axes.xaxis)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    lines = grid.flat[0].get_lines()
    grid.flat[0].set_ylabel("test loss, nats")
    figure.legend(lines, names, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(title, x=0.01, horizontalalignment="left", size=10, wrap=True)
    save(figure, path)


def _color(name: str) -> str:
    if not CONTENDERS[name].period:
        return LIMIT
    return OURS if CONTENDERS[name].ours else THEIRS
