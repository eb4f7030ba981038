"""The measurements of speed-ups, and points computed from the measurements."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallel_sgd.costs import KernelSpeeds, Link
from parallel_sgd.planning import Job

from ..report import machine
from .contenders import BATCH, CONTENDERS, SERIAL, model
from .learning import Learned
from .step_times import Alone, Timed

PREDICTED = (2, 4, 8, 16, 32, 64)  #: workers, with those that are measured


@dataclass(frozen=True)
class Predicted:
    """
    Attributes:
        contender, workers: of the prediction.
        samples_per_s: of all workers, without evaluations.
    """

    contender: str
    workers: int
    samples_per_s: float


def predict(
    workers: Iterable[int], step_s: float, link: Link, speeds: KernelSpeeds
) -> list[Predicted]:
    """Predict all contenders known to the planner, on hosts with a core each.

    Args:
        workers: more numbers than `PREDICTED`.
        step_s: of a single worker.
        link: of every host.
    """
    predicted = []
    for name, contender in CONTENDERS.items():
        for k in sorted({*PREDICTED, *workers} - {1}) if contender.candidate else ():
            job = Job(
                nodes=k + contender.servers,
                ranks_per_node=1,
                link=link,
                parameters=model().parameters.flat.size,
                step_s=step_s,
                minibatch=BATCH,
                optimizer_vectors=1,
                speeds=speeds,
            )
            assert contender.candidate
            predicted.append(Predicted(name, k, k * BATCH / contender.candidate.cost(job).total_s))
    return predicted


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
        learned: the accuracies; None if not measured.
        predicted: samples a second; None if the planner does not know the contender.
    """

    contender: str
    workers: int
    samples_per_s: Spread
    peak: float
    average: Spread
    learned: Learned | None
    predicted: float | None

    @property
    def accuracy(self) -> Spread | None:
        return Spread.of(self.learned.accuracies) if self.learned else None


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

    def whole_s(self, timed: Timed) -> list[float]:
        """Return the seconds of a whole training, by each round."""
        steps = self.options["samples"] / (BATCH * timed.workers)
        parts = timed.start_s, timed.step_s, timed.evaluation_s, timed.finish_s
        times = 1, steps, self.options["evaluations"], 1
        return [
            sum(n * s for n, s in zip(times, seconds, strict=True))
            for seconds in zip(*parts, strict=True)
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
        serial_peak = max(_rates(self.serial))
        order = list(CONTENDERS)
        points = []
        for timed in sorted(self.timed, key=lambda t: (order.index(t.contender), t.workers)):
            key = timed.contender, timed.workers
            rates = _rates(timed)
            points.append(
                Point(
                    *key,
                    Spread.of(rates),
                    max(rates) / serial_peak,
                    Spread.of([serial_s / seconds for seconds in self.whole_s(timed)]),
                    learned.get(key),
                    predicted.get(key),
                )
            )
        return points


def _rates(timed: Timed) -> list[float]:
    """Return samples a second of all workers in the steps of each round."""
    return [timed.workers * BATCH / step_s for step_s in timed.step_s]
