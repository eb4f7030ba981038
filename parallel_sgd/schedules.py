"""Values that change during training, as functions of the clock: samples seen by all ranks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from .checks import Real, read_points
from .errors import UserError
from .validation import integer, number, points, set_validated


class Schedule(ABC):
    """A value as a function of the samples seen by all ranks together. Local.

    A user's own schedule must be a dataclass with plain values as fields (numbers, text, tuples of
    these): ranks compare schedules by their `repr`.

    >>> @dataclass(frozen=True)
    ... class InverseRoot(Schedule):
    ...     start: float
    ...
    ...     def __call__(self, samples: int) -> float:
    ...         return self.start / math.sqrt(1 + samples)
    >>> InverseRoot(0.4)(3)
    0.2
    """

    @abstractmethod
    def __call__(self, samples: int) -> float: ...


@dataclass(frozen=True)
class Steps(Schedule):
    """A piecewise constant schedule.

    >>> lr = Steps({0: 0.1, 50_000: 0.01})
    >>> lr(49_999), lr(50_000)
    (0.1, 0.01)
    """

    values: Mapping[int, float]

    def __post_init__(self) -> None:
        set_validated(self, values=points("Steps values", self.values, _value))

    def __call__(self, samples: int) -> float:
        starts = list(self.values)
        return self.values[starts[bisect_right(starts, samples) - 1]]


@dataclass(frozen=True)
class Linear(Schedule):
    """A piecewise linear schedule through the given points, constant after the last: for warming
    up.

    >>> lr = Linear({0: 0.0, 1000: 0.4})
    >>> lr(250), lr(5000)
    (0.1, 0.4)
    """

    values: Mapping[int, float]

    def __post_init__(self) -> None:
        set_validated(self, values=points("Linear values", self.values, _value))

    def __call__(self, samples: int) -> float:
        starts = list(self.values)
        i = bisect_right(starts, samples) - 1
        begin = self.values[starts[i]]
        if i + 1 == len(starts):
            return begin
        end, width = self.values[starts[i + 1]], starts[i + 1] - starts[i]
        return begin + (end - begin) * (samples - starts[i]) / width


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a cosine from `start` at 0 samples down to `end` at `samples`, then constant.

    Source: Loshchilov & Hutter, SGDR, ICLR 2017, eq. 5, without restarts.
    """

    start: float
    end: float = 0.0
    samples: int

    def __post_init__(self) -> None:
        set_validated(
            self,
            start=_value("Cosine: start", self.start),
            end=_value("Cosine: end", self.end),
            samples=integer("Cosine: samples", self.samples, 1),
        )

    def __call__(self, samples: int) -> float:
        done = min(samples / self.samples, 1.0)
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class WarmUp(Schedule):
    """A schedule, or a number, times a linear ramp from 0 to 1.

    Args:
        samples: at the end of the ramp, at least 1.
        then: a number, or a `Schedule`.

    >>> lr = WarmUp(1000, Cosine(start=0.4, samples=2000))
    >>> lr(0), lr(500) < lr(1000), round(lr(1000), 6), lr(2000)
    (0.0, True, 0.2, 0.0)

    Source: Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.2.
    """

    samples: int
    then: float | Schedule

    def __post_init__(self) -> None:
        set_validated(
            self,
            samples=integer("WarmUp: samples", self.samples, 1),
            then=Rate()("WarmUp: then", self.then),
        )

    def __call__(self, samples: int) -> float:
        value = self.then(samples) if isinstance(self.then, Schedule) else self.then
        return value * min(samples / self.samples, 1.0)


def _value(name: str, value: Any) -> float:
    return number(name, value, 0)


class Rate:
    """A learning rate: a number, or a `Schedule` by samples."""

    SHAPES = ("linear", "cosine")  #: of schedules, between their points
    COSINE = "cosine:0:0.3,50000:0.01"
    EXAMPLE = (
        f"0:0.3,20000:0.03 (linear:0:0,1000:0.3 rises in between, {COSINE} falls; warmup:1000: "
        "before any of these starts at 0)"
    )

    metavar = "X | [warmup:S:][linear:|cosine:]S:X,..."
    expected = f"a number, or samples:rate pairs as {EXAMPLE}"

    def __call__(self, name: str, value: Any) -> float | Schedule:
        if not isinstance(value, Schedule):
            try:
                return number(name, value, 0)
            except UserError as error:
                raise UserError(f"{error}, or a Schedule") from None
        if not is_dataclass(value) or " at 0x" in repr(value):
            raise UserError(
                f"{name}={type(value).__name__}(...) must be a dataclass whose fields are plain "
                "values: ranks compare schedules by their repr"
            )
        return value

    def read(self, text: str) -> float | Schedule:
        """Parse ``0.1``, ``0:0.3,1000:0.1``, ``linear:0:0,1000:0.3`` or ``cosine:0:0.3,1000:0``,
        with or without the prefix ``warmup:500:``."""
        if ":" not in text:
            return float(text)
        if text.startswith("warmup:"):
            _, samples, rest = text.split(":", 2)
            return WarmUp(int(samples), self.read(rest))
        shape, _, rest = text.partition(":")
        rates = read_points(rest if shape in self.SHAPES else text, Real())
        if shape == "linear":
            return Linear(rates)
        if shape != "cosine":
            return Steps(rates)
        if len(rates) != 2 or 0 not in rates:
            raise UserError(
                f"{text!r} must give two rates, at 0 samples and at the end: {self.COSINE}"
            )
        end = max(rates)
        return Cosine(start=rates[0], end=rates[end], samples=end)
