"""The measurements of speed-ups, and points computed from the measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..report import machine
from .contenders import BATCH, CONTENDERS, SERIAL, TITLE
from .learning import Learned
from .predicted import Predicted
from .step_times import Alone, Timed


@dataclass(frozen=True)
class Spread:
    """The median of several values, and the least and the largest."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def text(self, form: str) -> str:
        middle, low, high = (format(v, form) for v in (self.middle, self.low, self.high))
        return middle if low == high else f"{middle} ({low} to {high})"


@dataclass(frozen=True)
class Point:
    """A contender with a number of workers.

    Attributes:
        samples_per_s: of all workers in steps, without evaluations, over the rounds.
        peak: speed-up of the best round's steps, over the best of serial SGD.
        average: speed-up of a whole training with start, evaluations and end, over the median of
            serial SGD; over the rounds.
        loss, accuracy: in nats and %, over the seeds; None if not measured.
        predicted: samples a second; None if the planner does not know the contender.
    """

    contender: str
    workers: int
    samples_per_s: Spread
    peak: float
    average: Spread
    loss: Spread | None
    accuracy: Spread | None
    predicted: float | None


@dataclass
class Results:
    """
    Attributes:
        options: of the benchmark; rates in bits/s, None: no limit.
        alone: a single worker's computing.
        timed, learned, predicted: by contender and workers.
        machine: of the measurement.
    """

    options: dict[str, Any]
    alone: Alone
    timed: list[Timed] = field(default_factory=list)
    learned: list[Learned] = field(default_factory=list)
    predicted: list[Predicted] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=machine)

    @property
    def rate(self) -> str:
        rate = self.options["rate"]
        return "links without a limit" if rate is None else f"links of {rate / 1e9:g} Gbit/s"

    @property
    def title(self) -> str:
        return f"Speed-up over serial SGD and what is learned: {TITLE}, {self.rate}"

    def rates(self, timed: Timed) -> list[float]:
        """Return samples a second of all workers in the steps of each round."""
        return [timed.workers * BATCH / step_s for step_s in timed.step_s]

    def whole_s(self, timed: Timed) -> list[float]:
        """Return the seconds of a whole training, by each round."""
        steps = self.options["samples"] / (BATCH * timed.workers)
        evaluations = self.options["evaluations"]
        return [
            start_s + steps * step_s + evaluations * evaluation_s + finish_s
            for start_s, step_s, evaluation_s, finish_s in zip(
                timed.start_s, timed.step_s, timed.evaluation_s, timed.finish_s, strict=True
            )
        ]

    @property
    def serial(self) -> Timed:
        """Serial SGD, the base of all comparisons."""
        (one,) = (t for t in self.timed if (t.contender, t.workers) == (SERIAL, 1))
        return one

    def points(self) -> list[Point]:
        """Return a point for each timed contender and number of workers, in order."""
        learned = {(one.contender, one.workers): one for one in self.learned}
        predicted = {(one.contender, one.workers): one.samples_per_s for one in self.predicted}
        serial_s = statistics.median(self.whole_s(self.serial))
        serial_peak = max(self.rates(self.serial))
        order = list(CONTENDERS)
        points = []
        for timed in sorted(self.timed, key=lambda t: (order.index(t.contender), t.workers)):
            key = timed.contender, timed.workers
            scores, rates = learned.get(key), self.rates(timed)
            points.append(
                Point(
                    *key,
                    Spread.of(rates),
                    max(rates) / serial_peak,
                    Spread.of([serial_s / seconds for seconds in self.whole_s(timed)]),
                    Spread.of(scores.losses) if scores else None,
                    Spread.of(scores.accuracies) if scores else None,
                    predicted.get(key),
                )
            )
        return points


def finite(rate: float) -> float | None:
    """Return a rate as JSON can hold it: None for no limit."""
    return None if rate == math.inf else rate
