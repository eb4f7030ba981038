"""What came of the runs, and how long it took; and what a soak has used, over its time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_sgd.training import require_matplotlib

from ..figures import save

if TYPE_CHECKING:
    from .soak import Sample
    from .summary import Tally

AS_EXPECTED, NOT_SO, RECOVERY, TO_END = "#2f6da8", "#c0392b", "#2f6da8", "#d08a3c"
MOST_LINES = 60  #: of a figure
QUANTITIES = {"memory_mib": "memory, MiB", "descriptors": "open files", "threads": "threads"}


def draw(tallies: Sequence[Tally], title: str, notes: Sequence[str], path: Path) -> None:
    """On the left how many runs came out as they must, on the right the seconds that it took."""
    pyplot, lines = require_matplotlib(), _lines(tallies)
    figure, (counts, seconds) = pyplot.subplots(
        1, 2, figsize=(13, 2 + 0.28 * len(lines)), layout="constrained", sharey=True
    )
    for y, of_line in enumerate(reversed(lines.values())):
        runs, met = sum(tally.runs for tally in of_line), sum(tally.met for tally in of_line)
        counts.barh(y, met, color=AS_EXPECTED)
        counts.barh(y, runs - met, left=met, color=NOT_SO)
        for tally in of_line:
            for values, color in ((tally.recovery_s, RECOVERY), (tally.seconds, TO_END)):
                seconds.plot(values, [y] * len(values), "|", color=color, alpha=0.6)
    counts.set_yticks(range(len(lines)), [*reversed(lines)], fontsize=8)
    counts.set_xlabel("runs (red: not as they must be)")
    seconds.set_xlabel("seconds from the fault")
    seconds.plot([], [], "|", color=RECOVERY, label="to the first step after it")
    seconds.plot([], [], "|", color=TO_END, label="to the job's end")
    seconds.legend(frameon=False)
    figure.suptitle(title, x=0.01, horizontalalignment="left", size=12)
    figure.supxlabel("\n".join(notes[-1:]), x=0.01, horizontalalignment="left", size=8)
    save(figure, path)


def _lines(tallies: Sequence[Tally]) -> dict[str, list[Tally]]:
    """What a line of the figure shows, by its name: a way of training in a scenario, or where those
    are too many a scenario."""
    lines: dict[str, list[Tally]] = {}
    for tally in tallies:
        name = f"{tally.scenario}: {tally.family}"
        lines.setdefault(tally.scenario if len(tallies) > MOST_LINES else name, []).append(tally)
    return lines


def draw_soak(samples: Sequence[Sample], title: str, notes: Sequence[str], path: Path) -> None:
    """A panel for each quantity, a line for each process."""
    pyplot = require_matplotlib()
    figure, panels = pyplot.subplots(
        len(QUANTITIES), 1, figsize=(11, 9), layout="constrained", sharex=True
    )
    for axes, (name, label) in zip(panels, QUANTITIES.items(), strict=True):
        for part, rank in sorted({(sample.part, sample.rank) for sample in samples}):
            own = [s for s in samples if (s.part, s.rank) == (part, rank)]
            values = [getattr(sample, name) for sample in own]
            axes.plot([s.time_s / 60 for s in own], values, label=f"{part}, rank {rank}")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("minutes")
    panels[0].legend(frameon=False, ncols=2, fontsize=8)
    figure.suptitle(title, x=0.01, horizontalalignment="left", size=12)
    figure.supxlabel("\n".join(notes), x=0.01, horizontalalignment="left", size=8)
    save(figure, path)
