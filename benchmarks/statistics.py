"""Comparisons of two ways of training, paired by seed: the bootstrap, and equivalence tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000

Interval = tuple[float, float]


@dataclass(frozen=True)
class Comparison:
    """The mean of paired differences of losses, by seed: below 0 is better.

    Attributes:
        mean, median: of the differences; far apart where a few seeds went wrong.
        interval_90, interval_95: bootstrap intervals of the mean.
        margin: differences up to this large do not matter.
    """

    mean: float
    median: float
    interval_90: Interval
    interval_95: Interval
    margin: float

    @property
    def reach(self) -> float:
        """The reach of the 90 % interval from 0, in margins: up to 1 is equivalent. (That is two
        one-sided tests at 5 %.)"""
        return max(map(abs, self.interval_90)) / self.margin

    @property
    def verdict(self) -> str:
        """The verdict: "equivalent"; "better", "worse" by the 95 % interval; or "undecided"."""
        if self.reach <= 1:
            return "equivalent"
        low, high = self.interval_95
        return "better" if high < 0 else "worse" if low > 0 else "undecided"

    def __str__(self) -> str:
        spans = (f"{low:+.4f} to {high:+.4f}" for low, high in (self.interval_90, self.interval_95))
        return "margin ±{:g}; 90 % interval {}, 95 % {}".format(self.margin, *spans)


def compare(ours: npt.ArrayLike, theirs: npt.ArrayLike, margin: float) -> Comparison:
    """Compare two lists [seeds] of losses, paired.

    With ten pairs a percentile interval is a little too short: of normal differences a 90 %
    interval covers the mean in about 86 % of all cases, a 95 % interval in 92 %.
    """
    difference = np.asarray(ours, float) - np.asarray(theirs, float)
    return Comparison(
        float(difference.mean()),
        float(np.median(difference)),
        bootstrap_interval(difference, 0.90),
        bootstrap_interval(difference, 0.95),
        margin,
    )


def bootstrap_interval(values: Any, confidence: float) -> Interval:
    """The percentile interval of the mean of values [n]; the same for the same values."""
    values = np.asarray(values, float)
    picks = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(values[picks].mean(axis=1), (tail, 1 - tail))
    return float(low), float(high)
