"""The outcomes of all runs: their table, their JSON, and the figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..panels import COLORS, SMALL, FilePath, panels
from ..report import Report, machine, table
from ..statistics import Comparison, compare
from .scenarios import SCENARIOS

MOST_LINES = 60  #: of a figure
EQUIVALENT = 0.01  #: nats: mean losses that differ by less are equally good
FEWEST_LOSSES = 10  #: below, losses are not compared

HEAD = (
    *("", "family", "expected", "runs", "met", "faults", "too late", "lost samples"),
    *("s to recover", "s to the end", "difference in loss"),
)


@dataclass
class Outcome:
    """The outcome of run `number` of a family in a scenario."""

    scenario: str
    family: str
    number: int
    faults: list[str] = field(default_factory=list)  #: in words
    met: bool = False  #: as expected
    missed: bool = False  #: training ended before the fault could do anything
    hung: bool = False  #: the job had to be killed
    code: int | None = None  #: the last job's exit code
    seconds: float = 0.0  #: from the fault to the job's end, the longest
    lost_samples: list[int] = field(default_factory=list)  #: by fault
    recovery_s: list[float] = field(default_factory=list)  #: to the next step, by fault
    loss: float | None = None  #: of the final model, in nats
    undisturbed: float | None = None  #: loss of an undisturbed run
    wrong: str = ""  #: the error of the result, in words; empty: none
    left: list[str] = field(default_factory=list)  #: processes and files left behind
    said: str = ""  #: the end of the job's output, if something went wrong

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


def hits(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes of runs in which a fault came in time."""
    return [outcome for outcome in outcomes if not outcome.missed]


def comparison(outcomes: Sequence[Outcome]) -> Comparison | None:
    """Compare the final losses with those of undisturbed runs, if there are enough."""
    pairs = [(o.loss, o.undisturbed) for o in hits(outcomes) if o.loss and o.undisturbed]
    if len(pairs) < FEWEST_LOSSES:
        return None
    return compare([ours for ours, _ in pairs], [theirs for _, theirs in pairs], EQUIVALENT)


def cells(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line of the table: medians, in parentheses the largest values, and the mean
    difference in loss, in nats."""
    first, hit, compared = outcomes[0], hits(outcomes), comparison(outcomes)
    met, faults = sum(outcome.met for outcome in hit), sum(len(o.faults) for o in hit)
    return [
        *(first.scenario, first.family, SCENARIOS[first.scenario].expected),
        *map(str, (len(hit), met, faults, len(outcomes) - len(hit))),
        _spread([samples for outcome in hit for samples in outcome.lost_samples], ",.0f"),
        _spread([seconds for outcome in hit for seconds in outcome.recovery_s], ".2f"),
        _spread([outcome.seconds for outcome in hit], ".1f"),
        f"{compared.mean:+.4f} {compared.verdict}" if compared else "",
    ]


def _spread(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({max(values):{form}})" if values else ""


@dataclass
class Results:
    """The outcomes of all runs."""

    options: dict[str, Any]  #: of the benchmark, and the MPI
    outcomes: list[Outcome] = field(default_factory=list)
    namespaces: list[str] = field(default_factory=list)  #: of emulated hosts, left at the end
    machine: dict[str, Any] = field(default_factory=machine)


class Summary(Report):
    """A table, a JSON file and a figure of the results."""

    def __init__(self, results: Results) -> None:
        ranks, mpi = results.options["ranks"], results.options["mpi"]
        super().__init__(f"Faults at random moments: {ranks} ranks, {mpi}")
        self.results = results
        order = list(SCENARIOS)
        self.rows_of: dict[tuple[str, str], list[Outcome]] = {}
        for outcome in sorted(results.outcomes, key=lambda o: order.index(o.scenario)):
            self.rows_of.setdefault((outcome.scenario, outcome.family), []).append(outcome)

    def print(self) -> None:
        lines = table(HEAD, map(cells, self.rows_of.values()))
        print(f"\n{self.title}\n", *lines, "", sep="\n")
        for key in dict.fromkeys(scenario for scenario, _ in self.rows_of):
            print(f"{key}: {SCENARIOS[key].what}.")
        print(self.sums(), *self.failures(), sep="\n")

    def sums(self) -> str:
        """Count all runs, in words."""
        outcomes = self.results.outcomes
        hit = hits(outcomes)
        left = sum(len(o.left) for o in outcomes) + len(self.results.namespaces)
        return (
            f"{sum(len(o.faults) for o in hit)} faults in {len(hit)} runs: "
            f"{sum(o.met for o in hit)} as they must be, "
            f"{sum(bool(o.wrong) for o in outcomes)} wrong results, "
            f"{sum(o.hung for o in outcomes)} hangs, {left} things left behind."
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
        """Draw the runs with the required outcome, and the seconds after a fault.

        A line is a family in a scenario, or a whole scenario if there are too many lines.
        """
        scenarios = {scenario for scenario, _ in self.rows_of}
        lines: dict[str, list[Outcome]] = {}
        for (scenario, family), outcomes in self.rows_of.items():
            name = family if len(scenarios) == 1 else f"{scenario}: {family}"
            name = scenario if len(self.rows_of) > MOST_LINES else name
            lines.setdefault(name, []).extend(hits(outcomes))
        titles = {
            "runs": "runs as required (red: not)",
            "recovery": "to the first step after a fault",
            "end": "to the end of the job",
        }
        of = f", {min(scenarios)}" if len(scenarios) == 1 else ""
        color, failed = COLORS["measured"], COLORS["failed"]
        with panels(
            titles,
            path,
            f"{self.title}{of}",
            columns=3,
            height=0.7 + 0.16 * len(lines),
            notes=[self.sums()],
            sharey=True,
            width_ratios=[1, 1.2, 1.2],
        ) as axes:
            counts, most = axes["runs"], max(map(len, lines.values()), default=0)
            for y, hit in enumerate(reversed(lines.values())):
                met = sum(outcome.met for outcome in hit)
                counts.barh(y, met, color=color, height=0.7)
                counts.barh(y, len(hit) - met, left=met, color=failed, height=0.7)
                counts.text(len(hit) + 0.02 * most, y, str(len(hit)), va="center", size=SMALL)
                recovered = [s for outcome in hit for s in outcome.recovery_s]
                ended = [outcome.seconds for outcome in hit]
                for key, seconds in (("recovery", recovered), ("end", ended)):
                    how = {"color": color, "alpha": 0.5, "markersize": 6}
                    axes[key].plot(seconds, [y] * len(seconds), "|", **how)
            counts.set_yticks(range(len(lines)), [*reversed(lines)], size=SMALL)
            counts.set_ylim(-0.7, len(lines) - 0.3)
            counts.set_xlim(0, 1.15 * most)
            counts.set_xlabel("runs")
            for key in ("recovery", "end"):
                axes[key].set_xlim(0)
                axes[key].set_xlabel("seconds")
