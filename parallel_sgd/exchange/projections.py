"""Random projections of a gradient before quantization, summed over all ranks.

`parallel_sgd.second_moment` explains the purpose, and in which steps gradients are projected.
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
    """Projects one gradient after the other, and sums the projections.

    Args:
        flat: a vector like the gradients.
        comm: the ranks.
        projected_step: returns the number of the current step, the same on all ranks, or 0 for a
            step without projections.

    Projections are sent with 16 bits each: in steps with projections, an additional quarter of a
    bit for each value of the gradient.

    Local, except for `sum`. Memory: some vectors of 1/64 of the gradient's length.
    """

    def __init__(self, flat: Array, comm: Communicator, projected_step: Callable[[], int]) -> None:
        sums = Parameters({"projections": empty_like(flat, groups_of(flat.size))})
        codec = HalfPrecision(half_format="bfloat16")
        self._exchange = Exchange(sums, comm, codec, residual_decay=0)
        self._sums, self._residuals = sums.flat, self._exchange.residuals(sums)
        self._projected_step = projected_step
        self._step = 0  # of the current gradient; 0: no projections

    def begin(self, quantized: Sequence[slice]) -> None:
        """Start with a new gradient. Local.

        Args:
            quantized: the slices of the gradient that will be quantized; if empty, nothing is
                projected.
        """
        self._step = self._projected_step() if quantized else 0
        self._sums.fill(0)

    def add(self, vector: Array, values: slice) -> None:
        """Project new values of the gradient, before they are exchanged. Local.

        Args:
            vector: the gradient.
            values: the slice with the new values.
        """
        if self._step:
            body(vector).add_to_groups(vector[values], values.start, self._step, self._sums)

    def sum(self) -> Array | None:
        """Return the projections of the sum of all ranks' gradients, [groups], or None.

        Valid until `begin`. None in a step without projections. Collective.
        """
        if not self._step:
            return None
        self._exchange.sum(self._sums, self._residuals)
        return self._sums

    @staticmethod
    def first_calls(x: Array) -> list[Callable[[], object]]:
        """Return calls for `kernels.prepare`, given an empty vector. Local."""
        return [
            *HalfPrecision(half_format="bfloat16").first_calls(),
            lambda: body(x).add_to_groups(x, 0, 0, x),
        ]

    @property
    def bytes_sent(self) -> int:
        return self._exchange.bytes_sent

    def close(self) -> None:
        self._exchange.close()
