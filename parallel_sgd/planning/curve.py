"""The samples until a loss, by the curve of an earlier run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Points = Sequence[tuple[int, float]]  #: (samples, loss), with rising samples


class Reached(NamedTuple):
    """An interval of samples: from a curve's first point at a loss to its last point above.

    Attributes:
        first: number of samples when the curve is first at or below the loss.
        last: number of samples when the curve is last above the loss; infinity if above at the end.
    """

    first: float
    last: float


def reached(points: Points, loss: float) -> Reached | None:
    """Return the samples at a loss, or None if the curve stays above. Local.

    Between two points the loss is taken as linear. The interval is short for a steady fall, and
    long for a noisy or flat curve. Nothing is known before the first point.
    """
    below = [number for number, (_, value) in enumerate(points) if value <= loss]
    if not below:
        return None
    above = [number for number, (_, value) in enumerate(points) if value > loss]
    first = _crossing(points, below[0], loss) if below[0] else 0.0
    if not above:
        return Reached(first, float(points[0][0]))
    if above[-1] == len(points) - 1:
        return Reached(first, math.inf)
    return Reached(first, _crossing(points, above[-1] + 1, loss))


def _crossing(points: Points, number: int, loss: float) -> float:
    """Return the samples of a loss between a point above and the following point."""
    (begin, above), (end, below) = points[number - 1], points[number]
    return begin + (end - begin) * (above - loss) / (above - below)
