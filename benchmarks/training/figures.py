"""Figures of seconds to a test loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..panels import COLORS, Label, label_ends, link_words, panels, plain_log
from .contenders import CONTENDERS, PLAIN
from .to_loss import ToLoss

TIMES = "\N{MULTIPLICATION SIGN}"
ONE_BIT, BLOCKS = "1 bit", "block momentum, 1 bit"

_HOOKS = {
    PLAIN: "DDP",
    "DDP, PowerSGD rank 4": "PowerSGD",
    "DDP, post-local SGD": "post-local SGD",
}
_BITS = {"4 bit": "4 bit", ONE_BIT: "1 bit"}
SHOWN = {
    False: {**_HOOKS, **_BITS, BLOCKS: "block momentum"},
    True: {**_HOOKS, **_BITS, "0.25 bit": "0.25 bit"},
}
"""The contenders that are drawn, with their names in the palette: of our models, and of
PyTorch's. The tables have all contenders."""


def draw_ways(
    by_rate: Mapping[str, Sequence[ToLoss]], title: str, path: Path, *, modules: bool
) -> None:
    """Draw a panel for each rate, a line for each contender: seconds to every loss it reached.

    Args:
        modules: whether PyTorch's models are trained.
    """
    titles = {rate: link_words(rate) for rate in by_rate}
    notes = [
        "Solid: ours. Dashed: PyTorch's DDP and its hooks. Each with a tuned learning rate; "
        "the table has more contenders."
    ]
    with panels(titles, path, title, height=2.5, notes=notes) as grid:
        for rate, axes in grid.items():
            losses = sorted({way.target for way in by_rate[rate]}, reverse=True)
            labels = []
            for name, method in SHOWN[modules].items():
                own = [way for way in by_rate[rate] if way.contender == name and way.reached]
                if not own:
                    continue
                x, y = [losses.index(way.target) for way in own], [way.seconds for way in own]
                style = "-o" if CONTENDERS[name].ours else "--s"
                axes.plot(x, y, style, color=COLORS[method], linewidth=1.4, markersize=3.5)
                labels.append(Label(name, x[-1], y[-1], COLORS[method]))
            axes.set_xticks(range(len(losses)), [f"{loss:g}" for loss in losses])
            axes.set_xlabel("test loss to reach, nats")
            axes.set_ylabel("seconds of training")
            axes.set_yscale("log")
            plain_log(axes.yaxis)
            label_ends(axes, labels)


def draw_bars(by_rate: Mapping[str, Sequence[ToLoss]], title: str, path: Path) -> None:
    """Draw the seconds to the last loss of four contenders, in a group for each rate.

    Of DDP's hooks the quickest at each rate takes part, and is named at its bar.
    """
    rows: list[tuple[float, str, str, ToLoss]] = []  # place, name, method, way
    heads: dict[str, float] = {}  # place of each rate
    place = 0.0
    for rate, ways in by_rate.items():
        last = min(way.target for way in ways)
        found = {way.contender: way for way in ways if way.target == last and way.reached}
        hooks = [way for name, way in found.items() if not CONTENDERS[name].ours and name != PLAIN]
        best = min(hooks, key=lambda way: way.seconds, default=None)
        heads[rate] = place
        for name, method, way in (
            ("PyTorch DDP", "DDP", found.get(PLAIN)),
            ("DDP with its best hook", "post-local SGD", best),
            ("ours, 1 bit", "1 bit", found.get(ONE_BIT)),
            ("ours, block momentum, 1 bit", "block momentum", found.get(BLOCKS)),
        ):
            if way:
                rows.append((place, name, method, way))
                place -= 1
        place -= 1.3
    longest = max(way.seconds for *_, way in rows)
    with panels({"": ""}, path, title, height=0.21 * len(rows) + 0.7) as grid:
        axes = grid[""]
        for y, name, method, way in rows:
            axes.barh(y, way.seconds, height=0.8, color=COLORS[method])
            hook = f" ({way.contender.partition(', ')[2]})" if "hook" in name else ""
            axes.text(1.03 * way.seconds, y, f"{_digits(way.seconds)} s{hook}", va="center", size=8)
        axes.set_yticks([y for y, *_ in rows], [name for _, name, *_ in rows], size=8)
        for rate, y in heads.items():
            place_of_text = {"transform": axes.get_yaxis_transform(), "weight": "bold", "size": 8}
            axes.text(0.006, y + 0.7, link_words(rate), **place_of_text)
        axes.set_xscale("log")
        axes.set_xlim(10, 2 * longest)
        axes.set_ylim(rows[-1][0] - 0.6, 1.4)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        plain_log(axes.xaxis)
        axes.set_xlabel("seconds of training (logarithmic)")


def _digits(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}"
