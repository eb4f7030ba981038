"""Random projections of a gradient before it is quantized, summed over all ranks.

What they are for, and when they are made: `parallel_sgd.second_moment`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..communication import Communicator
from ..compression import HalfPrecision
from ..kernels import body, empty_like
from ..parameters import Parameters
from ..second_moment import groups_of
from .exchange import Exchange

Array = Any  #: a NumPy or CuPy array


class Projections:
    """Projects the gradient of one step after the other.

    Args:
        flat: a vector like the gradients.
        comm: the ranks.
        projected_step: gives the number of the step that gradients are now computed for, the same
            on all ranks; 0 where they are not to be projected.

    They are sent with 16 bits each: in steps with projections, a quarter of a bit more for each
    value of the gradient.

    Local, but for `sum`. Memory: some vectors of 1/64 of the gradient's length.
    """

    def __init__(self, flat: Array, comm: Communicator, projected_step: Callable[[], int]) -> None:
        sums = Parameters({"projections": empty_like(flat, groups_of(flat.size))})
        codec = HalfPrecision(half_format="bfloat16")
        self._exchange = Exchange(sums, comm, codec, error_feedback=False)
        self._sums, self._residuals = sums.flat, self._exchange.residuals(sums)
        self._projected_step = projected_step
        self._step = 0  # that the gradient now projected is for; 0: it is not

    def begin(self, quantized: Sequence[slice]) -> None:
        """Another gradient begins.

        Args:
            quantized: which of its values will be; where none are, it is not projected.
        """
        self._step = self._projected_step() if quantized else 0
        self._sums.fill(0)

    def add(self, vector: Array, values: slice) -> None:
        """Values of the gradient are there, and not yet replaced by their sum."""
        if self._step:
            body(vector).add_to_groups(vector[values], values.start, self._step, self._sums)

    def sum(self) -> Array | None:
        """The projections of the sum of all ranks' gradients, [groups], valid until `begin`; None
        in a step without. Collective."""
        if not self._step:
            return None
        self._exchange.sum(self._sums, self._residuals)
        return self._sums

    @staticmethod
    def first_calls(x: Array) -> list[Callable[[], object]]:
        """Calls for `kernels.prepare` that need the kernels, given a vector of no values. Local."""
        return [
            *HalfPrecision(half_format="bfloat16").first_calls(),
            lambda: body(x).add_to_groups(x, 0, 0, x),
        ]

    @property
    def bytes_sent(self) -> int:
        return self._exchange.bytes_sent

    def close(self) -> None:
        self._exchange.close()
