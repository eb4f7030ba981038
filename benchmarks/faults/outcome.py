"""The outcome of a run, and the check of its result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..statistics import Comparison, compare
from .child import End

WORSE, MARGIN = 1.3, 0.03
"""A final loss is wrong beyond so many times an undisturbed run's, and so many nats more."""

EQUIVALENT = 0.01  #: nats: mean losses that differ by less are equally good
FEWEST_LOSSES = 10  #: below, losses are not compared


@dataclass(frozen=True)
class Reference:
    """An undisturbed run.

    Attributes:
        model: the checksum of the final one.
        loss: of the final model on the test data, in nats; the mean of several runs if runs differ.
        start_s: from the launch to the end of the first step.
        training_s: from there to the end of the last step.
        steps: of a rank.
    """

    model: str
    loss: float
    start_s: float
    training_s: float
    steps: int

    @property
    def step_s(self) -> float:
        return self.training_s / self.steps


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
        starts: of a job, in all.
        seconds: from the fault to the job's end, the longest.
        lost_samples: work lost, by fault.
        recovery_s: seconds from a fault to the next step, by fault.
        loss: of the final model, in nats.
        undisturbed: loss of an undisturbed run.
        wrong: the error of the result, in words; empty: none.
        processes, files: left behind.
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
    starts: int = 0
    seconds: float = 0.0
    lost_samples: list[int] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    loss: float | None = None
    undisturbed: float | None = None
    wrong: str = ""
    processes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    said: str = ""

    @property
    def bad(self) -> bool:
        """True if the run failed a check."""
        return bool(not self.met or self.hung or self.wrong or self.processes or self.files)

    def line(self) -> str:
        """Describe the outcome in a line."""
        words = ["as it must be" if self.met else f"NOT as it must be (exit code {self.code})"]
        words += ["too late to do anything"] * self.missed + ["HANG"] * self.hung
        words += [f"WRONG: {self.wrong}"] * bool(self.wrong)
        words += [f"LEFT: {', '.join(self.processes + self.files)}"] * bool(
            self.processes or self.files
        )
        faults = "; ".join(self.faults) or "nothing has happened"
        return f"{self.scenario} {self.family} {self.number}: {faults}: {', '.join(words)}"


@dataclass(frozen=True)
class Tally:
    """The runs of a scenario and a family.

    Attributes:
        runs: with a fault.
        faults: in all runs.
        met: runs with the expected outcome.
        missed: runs that ended before the fault; not among `runs`.
        lost_samples, recovery_s, seconds: of each fault, or run (from the fault to the job's end).
        losses, undisturbed: of the final models, in nats, and of undisturbed runs.
        wrong, hangs: runs with a wrong result, and without an end.
        left: number of processes and files left behind.
    """

    scenario: str
    family: str
    runs: int
    faults: int
    met: int
    missed: int
    lost_samples: list[int]
    recovery_s: list[float]
    seconds: list[float]
    losses: list[float]
    undisturbed: list[float]
    wrong: int
    hangs: int
    left: int

    @classmethod
    def of(cls, scenario: str, family: str, outcomes: Sequence[Outcome]) -> Tally:
        hit = [outcome for outcome in outcomes if not outcome.missed]
        compared = [(o.loss, o.undisturbed) for o in hit if o.loss and o.undisturbed]
        return cls(
            scenario=scenario,
            family=family,
            runs=len(hit),
            faults=sum(len(outcome.faults) for outcome in hit),
            met=sum(outcome.met for outcome in hit),
            missed=len(outcomes) - len(hit),
            lost_samples=[samples for outcome in hit for samples in outcome.lost_samples],
            recovery_s=[seconds for outcome in hit for seconds in outcome.recovery_s],
            seconds=[outcome.seconds for outcome in hit],
            losses=[loss for loss, _ in compared],
            undisturbed=[loss for _, loss in compared],
            wrong=sum(bool(outcome.wrong) for outcome in outcomes),
            hangs=sum(outcome.hung for outcome in outcomes),
            left=sum(len(outcome.processes) + len(outcome.files) for outcome in outcomes),
        )

    @property
    def comparison(self) -> Comparison | None:
        """Compare the losses with undisturbed losses, if there are enough."""
        if len(self.losses) < FEWEST_LOSSES:
            return None
        return compare(self.losses, self.undisturbed, EQUIVALENT)


def wrong_result(
    ends: Mapping[int, End], ranks: int, model: str | None, loss: float = math.inf
) -> str:
    """Say in words why the result of a run is wrong; empty if right.

    Args:
        ends: by rank.
        ranks: required number of ends.
        model: required checksum; None: any.
        loss: of an undisturbed run, in nats.
    """
    if len(ends) < ranks:
        return f"{len(ends)} of {ranks} ranks have come to their end"
    models = {end.model for end in ends.values()}
    if len(models) > 1:
        return f"the ranks hold {len(models)} different models"
    if model is not None and models != {model}:
        return "the model is not that of an undisturbed run"
    found = next(iter(ends.values())).loss
    if not math.isfinite(found) or found > WORSE * loss + MARGIN:
        return f"the loss is {found:.3f} nats, and undisturbed {loss:.3f}"
    return ""
