"""A worker's side of an array on servers: read and added to by rows, or as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..embedding import ArrayTable
from ..errors import UserError
from ..validation import kind_of
from .client import Client
from .remote_table import RemoteTable, Retry, Rows

Numbers = npt.NDArray[np.int64]
RowNumbers = npt.NDArray[Any] | Sequence[int]


class RemoteArray:
    """An array of float32 (`ArrayTable`) with its rows on servers.

    Servers apply an `add` on arrival. In mode "sync" of the model, servers wait for the next push
    of all workers, and then apply the sum of the additions of all workers, in the order of the
    workers. There `get` returns the array right after the latest push.

    Args:
        options: of the array.
        table: of the rows, or blocks, by number.

    Local. Cost: a message and an answer for each server with some of the rows.
    """

    def __init__(self, options: ArrayTable, table: RemoteTable) -> None:
        self.options, self._table = options, table

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.options.shape

    def get(self, rows: RowNumbers | None = None) -> Rows:
        """Read the array, or some rows.

        Args:
            rows: row numbers [m], from 0, repeats allowed. None: all rows.
        Returns:
            float32 [*shape], or [m, *shape[1:]]: a copy.
        Raises:
            UserError: a row number is invalid.
        """
        numbers, shape = self._numbers(rows)
        values = self._table.rows(numbers).reshape(-1)
        return values[: self.options.size].reshape(shape) if rows is None else values.reshape(shape)

    def add(self, delta: Rows, rows: RowNumbers | None = None, samples: int = 1) -> None:
        """Add to the array, or to some rows. With an optimizer: take a step.

        Args:
            delta: float32 [*shape], or [m, *shape[1:]]; not changed. Values for a repeated row are
                summed. With an optimizer: a gradient, summed over `samples`.
            rows: as for `get`.
            samples: at least 1. Used by an optimizer only. In mode "sync" the samples of the steps
                are used instead.
        Raises:
            UserError: a row number is invalid, or `delta` has a wrong form or is not finite.
        """
        numbers, values = self._given("delta", delta, rows)
        self._table.push(numbers, values, samples)

    def set(self, values: Rows, rows: RowNumbers | None = None) -> None:
        """Replace the array, or some rows, and reset the optimizer's state of these rows.

        Takes effect at once in every mode. Meant for initialization: a worker sets values, and all
        workers read them after `learner.meet()`.

        Args:
            values: float32 [*shape], or [m, *shape[1:]]; not changed.
            rows: as for `get`, without repeats.
        Raises:
            UserError: as `add`.
        """
        numbers, given = self._given("values", values, rows)
        if len(np.unique(numbers)) < len(numbers):
            raise UserError(f"rows of table {self.options.name!r} to set must all be different")
        self._table.set(numbers, given)

    def counts(self) -> dict[str, int]:
        """Return the counts of changed rows (or blocks), as `RemoteTable.counts`."""
        return self._table.counts()

    def rebind(self, client: Callable[[], Client] | None, retry: Retry) -> None:
        """See `RemoteTable.rebind`."""
        self._table.rebind(client, retry)

    def step_taken(self) -> None:
        """See `RemoteTable.step_taken`."""
        self._table.step_taken()

    def discard_prefetched(self) -> None:
        """See `RemoteTable.discard_prefetched`."""
        self._table.discard_prefetched()

    def _numbers(self, rows: RowNumbers | None) -> tuple[Numbers, tuple[int, ...]]:
        """Return the numbers of rows, or blocks, int64 [m], and the shape of their values."""
        shape, name = self.options.shape, self.options.name
        if rows is None:
            return np.arange(self.options.rows), shape
        if len(shape) == 1:
            raise UserError(
                f"rows of table {name!r} must be omitted: the table has one dimension, {shape}, "
                f"and is read and changed as a whole (with shape={(*shape, 1)} each value is a row)"
            )
        numbers = np.asarray(rows)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise UserError(
                f"rows of table {name!r} must be whole numbers [m]: it is {kind_of(rows)} of "
                f"{numbers.dtype} {list(numbers.shape)}"
            )
        wrong = np.flatnonzero((numbers < 0) | (numbers >= shape[0]))
        if len(wrong):
            raise UserError(
                f"rows of table {name!r} must be from 0 to {shape[0] - 1}: number {wrong[0]} is "
                f"{numbers[wrong[0]]}"
            )
        return numbers.astype(np.int64), (len(numbers), *shape[1:])

    def _given(self, what: str, values: Any, rows: RowNumbers | None) -> tuple[Numbers, Rows]:
        """Return the numbers of rows, or blocks, and their values, float32 [m, width]."""
        numbers, shape = self._numbers(rows)
        is_array = isinstance(values, np.ndarray)
        if not is_array or values.shape != shape or values.dtype != np.float32:
            is_ = f"{values.dtype} {list(values.shape)}" if is_array else kind_of(values)
            raise UserError(
                f"{what} for table {self.options.name!r} must be a NumPy array of float32 "
                f"{list(shape)}: it is {is_}"
            )
        flat: Rows = np.ascontiguousarray(values).reshape(-1)
        missing = len(numbers) * self.options.width - flat.size
        if missing:  # the last block is padded
            flat = np.concatenate([flat, np.zeros(missing, np.float32)])
        return numbers, flat.reshape(len(numbers), -1)
