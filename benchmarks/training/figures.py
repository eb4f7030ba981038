"""Lines of seconds to a test loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from parallel_sgd.training import require_matplotlib

from ..panels import panels, plain_log
from .contenders import CONTENDERS
from .to_loss import ToLoss

TIMES = "\N{MULTIPLICATION SIGN}"


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
