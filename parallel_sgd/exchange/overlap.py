"""An exchange in the background, while the rest of the gradient is being computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..communication import Communicator, InBackground, ProgramEnds, program_ends
from ..compression import problem_with
from ..errors import RanksLost
from ..kernels import empty_like, finish_on_device
from .exchange import Exchange
from .layout import Bucket
from .residuals import Residuals

Array = Any  #: a NumPy or CuPy array


class OverlappedExchange:
    """Runs one exchange at a time in a background thread, bucket by bucket.

    A bucket is complete, and may be sent, once all of its parameters are `ready`. Invalid values
    (NaN, for example) are replaced by zeros to protect the residuals of all ranks. `problem` then
    holds the reason until the ranks agree on the minibatch.

    Args:
        buckets: in the order of sending.
        name: of the thread.

    Attributes:
        problem: the reason why a part of the gradient cannot be exchanged, or None.
        restores_residuals: called as an exchange begins. If True, the residuals are copied, and
            `drain` restores the copies.
        on_complete: called with the vector and the slice of a complete bucket, before the bucket is
            sent.

    Local, except for the exchange itself, which runs until all buckets are complete.
    """

    def __init__(self, buckets: Sequence[Bucket], name: str) -> None:
        self.buckets, self._name = buckets, name
        self._bucket_of = {name: i for i, bucket in enumerate(buckets) for name in bucket.names}
        self._background: InBackground[None] | None = None
        self._vector: Array = None
        self._missing: list[set[str]] = []
        self._complete: list[bool] = []
        self.problem: str | None = None
        self._abandoned = False
        self.restores_residuals: Callable[[], bool] = lambda: False
        self.on_complete: Callable[[Array, slice], None] = lambda vector, values: None
        self._residual_copies: list[Array] = []
        self._copied_non_owned = False
        self._has_copies = False

    @property
    def running(self) -> bool:
        """True from `begin` until `finish`."""
        return self._background is not None

    def begin(self, exchange: Exchange, vector: Array, residuals: Residuals | None) -> None:
        """Start the exchange of a vector before any of its values are computed."""
        assert not self.running
        self._vector, self.problem = vector, None
        self._missing = [set(bucket.names) for bucket in self.buckets]
        self._complete = [False] * len(self.buckets)
        complete = self._complete
        self._copy_residuals(residuals)

        def is_complete(number: int) -> bool:
            if not complete[number] and program_ends():
                raise ProgramEnds("the program ends before a gradient is complete")
            if self._abandoned:
                raise RanksLost("a rank has failed before a gradient is complete")
            return complete[number]

        summed = partial(exchange.sum_in_background, vector, residuals, is_complete)
        self._background = InBackground(self._name, summed)

    def ready(self, name: str, bits: float) -> None:
        """Mark a parameter's gradient as complete, and send its bucket once all of the bucket is.

        Args:
            name: of the parameter.
            bits: the lowest number of bits used for any value.
        """
        number = self._bucket_of[name]
        self._missing[number].discard(name)
        if not self._missing[number] and not self._complete[number]:
            self._send(number, bits)

    def all_ready(self, bits: float) -> None:
        """Mark the whole gradient as complete; send all buckets not yet sent.

        Args:
            bits: see `ready`.
        """
        for number, complete in enumerate(self._complete):
            if not complete:
                self._send(number, bits)

    def finish(self) -> None:
        """Wait for the sum. Raises any error of the exchange."""
        assert self._background is not None
        background, self._background = self._background, None
        background.result()

    def drain(
        self,
        exchange: Exchange,
        empty: Callable[[], Array],
        residuals: Residuals | None,
        comm: Communicator,
    ) -> None:
        """Complete an exchange begun by any rank, and discard the sum.

        Args:
            exchange: begun here if this rank has not begun.
            empty: returns a vector of zeros, for a rank without an exchange.
            residuals: updated, or restored if `restores_residuals` asked for copies.
            comm: the ranks.

        Collective. Called when training cannot go on or is finished, so that no rank is left
        waiting.
        """
        if not comm.sum_integers(np.array([self.running], np.int64)).any():
            return
        if not self.running:
            self.begin(exchange, empty(), residuals)
        for number, complete in enumerate(self._complete):
            if not complete:
                self._vector[self.buckets[number].values].fill(0)
                self._send(number, 32)
        self.finish()
        if residuals is not None and self._has_copies:
            for error, kept in zip(residuals.vectors, self._residual_copies, strict=True):
                error[...] = kept
            residuals.has_non_owned = self._copied_non_owned

    def _copy_residuals(self, residuals: Residuals | None) -> None:
        """Copy the residuals if `drain` may have to restore them."""
        self._has_copies = residuals is not None and self.restores_residuals()
        if residuals is None or not self._has_copies:
            return
        vectors, self._copied_non_owned = residuals.vectors, residuals.has_non_owned
        if [error.size for error in vectors] != [kept.size for kept in self._residual_copies]:
            self._residual_copies = [empty_like(error, error.size) for error in vectors]
        for error, kept in zip(vectors, self._residual_copies, strict=True):
            kept[...] = error
            finish_on_device(kept)

    def abandon(self) -> None:
        """Wait until the exchange has failed, after ranks have failed. Local."""
        self._abandoned = True
        if self._background is not None:
            self._background.error()
            self._background = None

    def _send(self, number: int, bits: float) -> None:
        place = self.buckets[number].values
        values = self._vector[place]
        problem = problem_with(values, bits)
        if problem:
            self.problem = self.problem or problem
            values.fill(0)
        self.on_complete(self._vector, place)
        finish_on_device(values)
        self._complete[number] = True
