"""The table of all runs, their JSON, and its figure."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..panels import panels
from ..report import DrawnReport, Report, load, machine, table
from .outcome import Outcome, Tally
from .scenarios import SCENARIOS
from .soak import Soak, Soaked

TITLE = "Faults at random moments"
AS_EXPECTED, NOT_SO, RECOVERY, TO_END = "#2f6da8", "#c0392b", "#2f6da8", "#d08a3c"
MOST_LINES = 60  #: of a figure


@dataclass
class Results:
    """
    Attributes:
        options: of the benchmark, and the MPI.
        outcomes: of all runs.
        namespaces: of emulated hosts, left at the end.
        machine: of the runs.
    """

    options: dict[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)
    namespaces: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=machine)

    def tallies(self) -> list[Tally]:
        """Return a tally for each scenario and family."""
        rows: dict[tuple[str, str], list[Outcome]] = {}
        for outcome in self.outcomes:
            rows.setdefault((outcome.scenario, outcome.family), []).append(outcome)
        order = list(SCENARIOS)
        keys = sorted(rows, key=lambda key: order.index(key[0]))
        return [Tally.of(*key, rows[key]) for key in keys]


class Summary(DrawnReport):
    """A table, a JSON file and a figure of the results."""

    def __init__(self, results: Results) -> None:
        mpi, ranks = results.options["mpi"], results.options["ranks"]
        super().__init__(f"{TITLE}: {ranks} ranks, {mpi}")
        self.results, self.machine = results, results.machine

    def print(self) -> None:
        """Print medians, and in parentheses the largest values.

        Losses are multiples of an undisturbed run's loss; the difference is the mean, in nats.
        """
        head = (
            "", "family", "expected", "runs", "met", "faults", "too late", "lost samples",
            "s to recover", "s to the end", "loss", "difference", "wrong", "hangs", "left behind",
        )  # fmt: skip
        rows: list[tuple[str, ...]] = []
        tallies, said = self.results.tallies(), ""
        for tally in tallies:
            scenario, compared = SCENARIOS[tally.scenario], tally.comparison
            multiples = [a / b for a, b in zip(tally.losses, tally.undisturbed, strict=True)]
            rows.append(
                (
                    tally.scenario if tally.scenario != said else "",
                    tally.family,
                    scenario.expected,
                    *map(str, (tally.runs, tally.met, tally.faults, tally.missed)),
                    _spread(tally.lost_samples, ",.0f"),
                    _spread(tally.recovery_s, ".2f"),
                    _spread(tally.seconds, ".1f"),
                    _spread(multiples, ".2f"),
                    f"{compared.mean:+.4f} {compared.verdict}" if compared else "",
                    *map(str, (tally.wrong, tally.hangs, tally.left)),
                )
            )
            said = tally.scenario
        words = *self.notes(), *self.faults()
        print(f"\n{self.title}\n", *table(head, rows), "", *words, sep="\n")

    def notes(self) -> list[str]:
        """Describe each scenario, and the sums, in words."""
        tallies = self.results.tallies()
        happens = [f"{k}: {SCENARIOS[k].what}." for k in dict.fromkeys(t.scenario for t in tallies)]
        runs, met = sum(t.runs for t in tallies), sum(t.met for t in tallies)
        wrong, hangs = sum(t.wrong for t in tallies), sum(t.hangs for t in tallies)
        left = sum(t.left for t in tallies) + len(self.results.namespaces)
        return [
            *happens,
            f"{sum(t.faults for t in tallies)} faults in {runs} runs: {met} as they must be, "
            f"{wrong} wrong results, {hangs} hangs, {left} things left behind.",
        ]

    def faults(self) -> list[str]:
        """Return a line for each failed run, and for each leftover at the end."""
        return [
            *(outcome.line() for outcome in self.results.outcomes if outcome.bad),
            *(f"LEFT: network namespace {name}" for name in self.results.namespaces),
        ]

    def content(self) -> dict[str, Any]:
        tallies = [asdict(tally) for tally in self.results.tallies()]
        return {"title": self.title, **asdict(self.results), "tallies": tallies}

    def draw(self, path: str | os.PathLike[str]) -> None:
        draw(self.results.tallies(), self.title, self.notes(), Path(path))


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


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):{form}} ({max(values):{form}})"


def read(path: str | os.PathLike[str]) -> Report:
    """Read the results of runs under faults, or of a soak.

    Raises:
        UserError: the file holds something else.
    """
    kills = load(path, Results) if "outcomes" in Path(path).read_text() else None
    return Summary(kills) if kills else Soaked(load(path, Soak))
