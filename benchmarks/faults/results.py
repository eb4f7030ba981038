"""The outcomes of all runs: their table, their JSON, and the figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..panels import FilePath, panels
from ..report import Report, machine, table
from ..statistics import Comparison, compare
from .scenarios import SCENARIOS

TITLE = "Faults at random moments"
AS_EXPECTED, NOT_SO, RECOVERY, TO_END = "#2f6da8", "#c0392b", "#2f6da8", "#d08a3c"
MOST_LINES = 60  #: of a figure
EQUIVALENT = 0.01  #: nats: mean losses that differ by less are equally good
FEWEST_LOSSES = 10  #: below, losses are not compared

HEAD = (
    *("", "family", "expected", "runs", "met", "faults", "too late", "lost samples"),
    *("s to recover", "s to the end", "loss", "difference", "wrong", "hangs", "left behind"),
)


@dataclass
class Outcome:
    """
    Attributes:
        scenario, family, number: of the run.
        faults: in words.
        met: whether the outcome is the expected outcome.
        missed: whether training ended before the fault could do anything.
        hung: whether the job had to be killed.
        code: the last job's exit code.
        seconds: from the fault to the job's end, the longest.
        lost_samples: work lost, by fault.
        recovery_s: seconds from a fault to the next step, by fault.
        loss: of the final model, in nats.
        undisturbed: loss of an undisturbed run.
        wrong: the error of the result, in words; empty: none.
        left: processes and files left behind.
        said: the end of the job's output, if something went wrong.
    """

    scenario: str
    family: str
    number: int
    faults: list[str] = field(default_factory=list)
    met: bool = False
    missed: bool = False
    hung: bool = False
    code: int | None = None
    seconds: float = 0.0
    lost_samples: list[int] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    loss: float | None = None
    undisturbed: float | None = None
    wrong: str = ""
    left: list[str] = field(default_factory=list)
    said: str = ""

    @property
    def bad(self) -> bool:
        """True if the run failed a check."""
        return bool(not self.met or self.hung or self.wrong or self.left)

    def line(self) -> str:
        """Describe the outcome in a line."""
        words = ["as it must be" if self.met else f"NOT as it must be (exit code {self.code})"]
        words += ["too late to do anything"] * self.missed + ["HANG"] * self.hung
        words += [f"WRONG: {self.wrong}"] * bool(self.wrong)
        words += [f"LEFT: {', '.join(self.left)}"] * bool(self.left)
        faults = "; ".join(self.faults) or "nothing has happened"
        return f"{self.scenario} {self.family} {self.number}: {faults}: {', '.join(words)}"


class Tally:
    """The outcomes of a scenario and a family; `hit` are those of runs with a fault in time."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.scenario, self.family = outcomes[0].scenario, outcomes[0].family
        self.hit = [outcome for outcome in outcomes if not outcome.missed]
        self.missed = len(outcomes) - len(self.hit)
        self.faults = sum(len(outcome.faults) for outcome in self.hit)
        self.met = sum(outcome.met for outcome in self.hit)
        self.wrong = sum(bool(outcome.wrong) for outcome in outcomes)
        self.hangs = sum(outcome.hung for outcome in outcomes)
        self.left = sum(len(outcome.left) for outcome in outcomes)
        self.recovery_s = [seconds for outcome in self.hit for seconds in outcome.recovery_s]
        self.seconds = [outcome.seconds for outcome in self.hit]

    def losses(self) -> list[tuple[float, float]]:
        """Return final losses in nats, each with the loss of an undisturbed run."""
        return [(o.loss, o.undisturbed) for o in self.hit if o.loss and o.undisturbed]

    def comparison(self) -> Comparison | None:
        """Compare the losses with undisturbed losses, if there are enough."""
        ours, theirs = ([pair[i] for pair in self.losses()] for i in range(2))
        return compare(ours, theirs, EQUIVALENT) if len(ours) >= FEWEST_LOSSES else None

    def cells(self, expected: str) -> list[str]:
        """Return the line of the table: medians, and in parentheses the largest values.

        Losses are multiples of an undisturbed run's loss; the difference is the mean, in nats.
        """
        compared = self.comparison()
        return [
            *(self.scenario, self.family, expected),
            *map(str, (len(self.hit), self.met, self.faults, self.missed)),
            _spread([lost for outcome in self.hit for lost in outcome.lost_samples], ",.0f"),
            _spread(self.recovery_s, ".2f"),
            _spread(self.seconds, ".1f"),
            _spread([loss / undisturbed for loss, undisturbed in self.losses()], ".2f"),
            f"{compared.mean:+.4f} {compared.verdict}" if compared else "",
            *map(str, (self.wrong, self.hangs, self.left)),
        ]


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


class Summary(Report):
    """A table, a JSON file and a figure of the results."""

    def __init__(self, results: Results) -> None:
        super().__init__(f"{TITLE}: {results.options['ranks']} ranks, {results.options['mpi']}")
        self.results = results
        rows: dict[tuple[str, str], list[Outcome]] = {}
        for outcome in results.outcomes:
            rows.setdefault((outcome.scenario, outcome.family), []).append(outcome)
        order = list(SCENARIOS)
        self.tallies = [Tally(rows[key]) for key in sorted(rows, key=lambda k: order.index(k[0]))]

    def print(self) -> None:
        rows = [tally.cells(SCENARIOS[tally.scenario].expected) for tally in self.tallies]
        print(f"\n{self.title}\n", *table(HEAD, rows), "", sep="\n")
        for key in dict.fromkeys(tally.scenario for tally in self.tallies):
            print(f"{key}: {SCENARIOS[key].what}.")
        print(self.sums(), *self.failures(), sep="\n")

    def sums(self) -> str:
        """Count all runs, in words."""
        tallies = self.tallies
        runs, met = sum(len(t.hit) for t in tallies), sum(t.met for t in tallies)
        wrong, hangs = sum(t.wrong for t in tallies), sum(t.hangs for t in tallies)
        left = sum(t.left for t in tallies) + len(self.results.namespaces)
        return (
            f"{sum(t.faults for t in tallies)} faults in {runs} runs: {met} as they must be, "
            f"{wrong} wrong results, {hangs} hangs, {left} things left behind."
        )

    def failures(self) -> list[str]:
        """Return a line for each failed run, and for each leftover at the end."""
        return [
            *(outcome.line() for outcome in self.results.outcomes if outcome.bad),
            *(f"LEFT: network namespace {name}" for name in self.results.namespaces),
        ]

    def content(self) -> dict[str, Any]:
        return {"title": self.title, **asdict(self.results)}

    def draw(self, path: FilePath) -> None:
        """Draw the expected outcomes on the left, and the seconds after a fault on the right."""
        lines = self._lines()
        size, legend = (6.5, 1 + 0.28 * len(lines)), ("outside lower right", 2)
        titles, notes = {"runs": "", "seconds": ""}, [self.sums()]
        with panels(
            titles, path, self.title, size=size, notes=notes, legend=legend, sharey=True
        ) as axes:
            counts, seconds = axes["runs"], axes["seconds"]
            for y, tallies in enumerate(reversed(lines.values())):
                runs, met = sum(len(tally.hit) for tally in tallies), sum(t.met for t in tallies)
                counts.barh(y, met, color=AS_EXPECTED)
                counts.barh(y, runs - met, left=met, color=NOT_SO)
                for tally in tallies:
                    for values, color in ((tally.recovery_s, RECOVERY), (tally.seconds, TO_END)):
                        seconds.plot(values, [y] * len(values), "|", color=color, alpha=0.6)
            counts.set_yticks(range(len(lines)), [*reversed(lines)], fontsize=8)
            counts.set_xlabel("runs (red: not as they must be)")
            seconds.set_xlabel("seconds from the fault")
            seconds.plot([], [], "|", color=RECOVERY, label="to the first step after it")
            seconds.plot([], [], "|", color=TO_END, label="to the job's end")

    def _lines(self) -> dict[str, list[Tally]]:
        """Return the tallies of each line, by its name: a family in a scenario, or a whole scenario
        if there are too many lines."""
        lines: dict[str, list[Tally]] = {}
        many = len(self.tallies) > MOST_LINES
        for tally in self.tallies:
            name = tally.scenario if many else f"{tally.scenario}: {tally.family}"
            lines.setdefault(name, []).append(tally)
        return lines


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):{form}} ({max(values):{form}})"
