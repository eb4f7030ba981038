"""Bars of seconds a step, in a colour for each side; and lines of seconds to a test loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from parallel_sgd.training import require_matplotlib

from ..panels import panels, plain_log
from .contenders import CONTENDERS, PLAIN
from .step_times import StepTime
from .to_loss import ToLoss

TIMES = "\N{MULTIPLICATION SIGN}"
COLORS = {"ours": "#2f6da8", "PyTorch": "#d08a3c", "either without communication": "#b8b8b8"}


def draw_times(by_rate: Mapping[str, Mapping[str, StepTime]], title: str, path: Path) -> None:
    """Draw a panel for each rate, a bar for each contender, with seconds and speed-up over DDP."""
    names = [name for name in CONTENDERS if any(name in times for times in by_rate.values())][::-1]
    titles = {rate: f"links: {rate}" for rate in by_rate}
    size = 6.5, 0.28 * len(names) + 0.9
    with panels(titles, path, title, size=size, sharey=True) as grid:
        for rate, axes in grid.items():
            times = by_rate[rate]
            plain = times.get(PLAIN)
            axes.set_xlim(0, 1.3 * max(time.seconds for time in times.values()))
            axes.set_yticks(range(len(names)), names)
            axes.set_xlabel("seconds a step")
            for y, name in enumerate(names):
                if name not in times:
                    continue
                kind, seconds = _kind(name), times[name].seconds
                axes.barh(y, seconds, color=COLORS[kind], label=kind)
                text = f" {seconds:.3g} s"
                if plain and name != PLAIN:
                    text += f", {plain.seconds / seconds:.1f}{TIMES}"
                axes.text(seconds, y, text, va="center", size=8)


def draw_ways(by_rate: Mapping[str, Sequence[ToLoss]], title: str, path: Path) -> None:
    """Draw a panel for each rate, a line for each contender: seconds to every loss it reached."""
    colors = require_matplotlib().get_cmap("tab20").colors
    titles = {rate: f"links: {rate}" for rate in by_rate}
    legend = "outside lower center", 4
    with panels(titles, path, title, columns=4, size=(4.5, 5.5), legend=legend) as grid:
        for rate, axes in grid.items():
            names = dict.fromkeys(way.contender for way in by_rate[rate])
            for name, color in zip(names, colors, strict=False):
                own = [way for way in by_rate[rate] if way.contender == name and way.reached]
                style = "-o" if CONTENDERS[name].ours else "--s"
                seconds, losses = [way.seconds for way in own], [way.target for way in own]
                axes.plot(seconds, losses, style, color=color, label=name)
            axes.set_xlabel("seconds of training")
            axes.set_ylabel("test loss, nats")
            axes.set_xscale("log")
            plain_log(axes.xaxis)


def _kind(name: str) -> str:
    if not CONTENDERS[name].period:
        return "either without communication"
    return "ours" if CONTENDERS[name].ours else "PyTorch"
