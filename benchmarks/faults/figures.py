"""The figure of all runs: the number of expected outcomes, and their seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..panels import panels
from .outcome import Tally

AS_EXPECTED, NOT_SO, RECOVERY, TO_END = "#2f6da8", "#c0392b", "#2f6da8", "#d08a3c"
MOST_LINES = 60  #: of a figure


def draw(tallies: Sequence[Tally], title: str, notes: Sequence[str], path: Path) -> None:
    """Draw the number of expected outcomes on the left, and the seconds after a fault on the right.

    Args:
        notes: only the last note is shown.
    """
    lines, titles = _lines(tallies), {"runs": "", "seconds": ""}
    size, legend = (6.5, 1 + 0.28 * len(lines)), ("outside lower right", 2)
    with panels(
        titles, path, title, size=size, notes=notes[-1:], legend=legend, sharey=True
    ) as axes:
        counts, seconds = axes["runs"], axes["seconds"]
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


def _lines(tallies: Sequence[Tally]) -> dict[str, list[Tally]]:
    """Return the tallies of each line, by its name: a family in a scenario, or a whole scenario if
    there are too many lines."""
    lines: dict[str, list[Tally]] = {}
    for tally in tallies:
        name = f"{tally.scenario}: {tally.family}"
        lines.setdefault(tally.scenario if len(tallies) > MOST_LINES else name, []).append(tally)
    return lines
