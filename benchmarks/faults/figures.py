"""The figure of all runs: how many came out as expected, and how long each took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parallel_sgd.training import require_matplotlib

from ..figures import save
from .outcome import Tally

AS_EXPECTED, NOT_SO, RECOVERY, TO_END = "#2f6da8", "#c0392b", "#2f6da8", "#d08a3c"
MOST_LINES = 60  #: of a figure


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
