"""Bars of seconds a step, and test loss by seconds; ours and theirs in two colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from parallel_sgd.training import require_matplotlib

from ..figures import save
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


def draw_curves(runs: Sequence[ToLoss], title: str, path: Path) -> None:
    """Test loss by seconds of training: a line for each contender, solid for ours."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for run in runs:
        seconds, losses = zip(*run.curve, strict=True)
        style = "-" if CONTENDERS[run.contender].ours else "--"
        axes.plot(seconds, losses, style, label=f"{run.contender}, lr {run.lr:g}")
    axes.axhline(runs[0].target, color="#888", linewidth=0.8, zorder=0)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("test loss, nats")
    axes.set_xscale("log")
    axes.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.suptitle(title, x=0.01, horizontalalignment="left", size=10, wrap=True)
    save(figure, path)


def _color(name: str) -> str:
    if not CONTENDERS[name].period:
        return LIMIT
    return OURS if CONTENDERS[name].ours else THEIRS
