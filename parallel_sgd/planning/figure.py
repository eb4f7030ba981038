"""Scaling efficiency of every algorithm over the number of nodes, as a figure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ..palette import GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from .candidates import Blocks, Candidate, DataParallel, DoubleBuffered, candidates
from .job import Job
from .recommendation import title

_BLUES = {32.0: "#08306b", 16: "#08519c", 8: "#2171b5", 4: "#4292c6", 2: "#6baed6", 1: "#9ecae1"}
_BLOCKS = {"model averaging": ORANGE, "block momentum": GREEN, "SlowMo": PURPLE}


def draw(
    path: str | os.PathLike[str],
    form: str,
    nodes: Sequence[int],
    job: Job,
    described: str,
    pyplot: Any,
) -> None:
    """Draw a line for each algorithm.

    Args:
        path: of the figure.
        form: "png", "svg", …
        nodes: the numbers of nodes to plot.
        job: on the number of nodes in question.
        described: the job in words.
        pyplot: Matplotlib's.
    """
    figure, axes = pyplot.subplots(figsize=(10, 6), layout="constrained")
    for candidate in candidates(job.on(max(nodes))):
        possible = [n for n in nodes if candidate.is_possible(job.on(n))]
        efficiencies = [candidate.cost(job.on(n)).efficiency for n in possible]
        axes.plot(possible, efficiencies, label=title(candidate), **_style(candidate))
    axes.axvline(job.nodes, color="#999", linewidth=1, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [f"{n:,}" for n in nodes])
    axes.minorticks_off()
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("nodes")
    axes.set_ylabel("samples per second of a node, relative to a node that never waits")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.suptitle(described, x=0.01, horizontalalignment="left", size=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130, format=form)
    pyplot.close(figure)


def _style(candidate: Candidate) -> dict[str, Any]:
    full = "-" if candidate.bits == 32 else "--"
    if isinstance(candidate, Blocks):
        color = _BLOCKS.get(candidate.name, SKY)
        return {"color": color, "linestyle": full, "linewidth": 1.2}
    if isinstance(candidate, DoubleBuffered):
        return {"color": VERMILION, "linestyle": full}
    if isinstance(candidate, DataParallel):
        color = _BLUES.get(candidate.bits, "#c6dbef")
        return {"color": color, "linestyle": "--" if candidate.overlap else "-"}
    return {"color": GREY}
