"""A server's part of a distributed embedding table.

Memory per row: the row with its optimizer's state, 8 bytes of id, 10.7 to 13.3 bytes of slots; 8
more bytes each for the clock of the last push (with `evict_after`) and for the steps (with Adam).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..kernels import row_kernels
from ..local_step import OptimizerState
from ..optimizers import Adagrad, Adam
from ..validation import integer
from .options import Table
from .records import Records

__all__ = ["RowTable", "server_of"]

Array = npt.NDArray[Any]
Contents = dict[str, Array]

LOAD_CHUNK = 1 << 16  #: number of rows that `add` loads at a time
SPARE_COUNTS = 1 << 12  #: number of unused counts that may always remain

_KEYS = {"id": "ids"}
_PENDING_KEYS = {"id": "pending_ids", "steps": "pending_counts", "pushed": "pending_pushed"}


def server_of(ids: Array, servers: int) -> Array:
    """Return the server of each id: int32 [m], from 0, for ids int64 [m]."""
    return row_kernels().server_of(ids, servers)  # type: ignore[no-any-return]


class RowTable:
    """Rows of float32 by id, each with its optimizer's state. Local; not thread-safe.

    Attributes:
        options: of the whole table.
        samples: in all pushes so far: the clock of learning rates and eviction.
        evicted: number of rows evicted so far.
        pending: number of ids with pushes but without a row so far.

    The GIL is released during lookups and changes of rows.
    """

    def __init__(self, options: Table) -> None:
        self.options, self._name = options, f"table {options.name!r}"
        self._initial = options.seed, np.float32(options.initial_scale)
        self.samples = self.evicted = self.pending = 0
        self._kernels = row_kernels()
        self._swept = 0  # clock of the latest eviction
        state = options.optimizer.initial_values if options.optimizer else {}
        self._buffers = tuple(state)
        (self._filling,) = set(state.values()) or {0.0}  # the same for all buffers
        clock = () if options.evict_after is None else ("pushed",)
        steps = ("steps",) if isinstance(options.optimizer, Adam) else ()
        self._rows = Records((*clock, *steps), ("values", *self._buffers), options.width)
        # Pushes of ids without a row; 0 once the id has a row.
        self._counts = Records((*clock, "steps")) if options.entry_count > 1 else None

    def __len__(self) -> int:
        return self._rows.count

    @property
    def is_per_sample(self) -> bool:
        """True if the learning rate applies to summed gradients, or without an optimizer."""
        return self.options.optimizer is None or self.options.optimizer.lr is None

    @property
    def nbytes(self) -> int:
        """Memory of the table in bytes. Unused memory, at most 64 MiB, is not resident."""
        return self._rows.nbytes + (self._counts.nbytes if self._counts else 0)

    def pull(self, ids: Array, out: Array) -> None:
        """Read rows. An id without a row has its initial values, and still has no row afterwards.

        Args:
            ids: int64 [m], any values, repeats allowed.
            out: float32 [m, width], written.
        Raises:
            UserError: an array has the wrong dtype or shape.
        """
        self._check(ids, "out", out)
        rows = self._rows.find(ids)
        self._kernels.read(self._rows.layout, ids, rows, *self._initial, out)

    def push(self, ids: Array, gradient: Array, samples: int, lr_factor: float = 1.0) -> None:
        """Take an optimizer step on rows, and advance the clock.

        Without an optimizer, the gradient is added to the rows. Ids without a row receive a row
        (see `Embedding.entry_count`). Cold rows may be evicted.

        Args:
            ids: int64 [m], any values, without repeats.
            gradient: float32 [m, width], summed over `samples`; not changed.
            samples: at least 1, or 0 without ids.
            lr_factor: of the learning rate.
        Raises:
            UserError: as `pull`, or a schedule's value is invalid. The table is then unchanged.
        """
        self._check(ids, "gradient", gradient)
        samples = integer("samples", samples, 1 if len(ids) else 0)
        now = OptimizerState(samples=self.samples, lr_factor=lr_factor)
        optimizer = self.options.optimizer
        lr = optimizer.mean_lr(now, samples) if optimizer else 0.0
        self.samples += samples
        if len(ids):
            rows = self._rows.find(ids)
            self._enter(ids, rows)
            self._step(rows, gradient, lr, samples)
        self._evict()

    def set(self, ids: Array, values: Array) -> None:
        """Replace rows. A replaced row has the optimizer's initial state.

        Args:
            ids: int64 [m], any values, without repeats.
            values: float32 [m, width]; not changed.
        Raises:
            UserError: an array has the wrong dtype or shape.
        """
        self._check(ids, "values", values)
        rows = self._rows.find(ids)
        self._rows.insert(ids, rows, self.samples)
        fields = {name: np.full_like(values, self._filling) for name in self._buffers}
        numbers = {"steps": 0, "pushed": self.samples}
        for name in numbers.keys() & set(self._rows.names):
            fields[name] = np.full(len(ids), numbers[name])
        self._rows.set(rows, {"values": values, **fields})

    def contents(self) -> Contents:
        """Return copies of the table for a checkpoint, in the order in which rows were created.

        Returns:
            "samples", "swept" int64 [1], clocks; "ids" int64 [n]; "values" and the optimizer's
            buffers, named as in `OptimizerState.buffers`, float32 [n, width]; with Adam "steps"
            int64 [n]; with `evict_after` "pushed" int64 [n], the clock of the last push; with
            `entry_count` > 1 "pending_ids", "pending_counts" int64 [p], and with both
            "pending_pushed".
        """
        contents = {"samples": np.array([self.samples]), "swept": np.array([self._swept])}
        for name in self._rows.names:
            contents[_KEYS.get(name, name)] = self._rows.column(name)
        if self._counts:
            counting = self._counts.column("steps") > 0
            for name in self._counts.names:
                contents[_PENDING_KEYS[name]] = self._counts.column(name)[counting]
        return contents

    def add(self, contents: Mapping[str, Array], keep: Callable[[Array], Array]) -> None:
        """Load this server's rows and counts from saved `contents`.

        Args:
            contents: of a table with the same options, from any server of any number. Loading a
                second file replaces existing rows. Without clocks of the last pushes, rows count as
                pushed now.
            keep: maps ids int64 [k] to a boolean [k]: True for this server's ids.
        """
        self.samples = max(self.samples, int(contents["samples"][0]))
        self._swept = max(self._swept, int(contents["swept"][0]))
        self._load(self._rows, _KEYS, contents, keep)
        if self._counts and "pending_ids" in contents:
            self._load(self._counts, _PENDING_KEYS, contents, keep)
            self.pending = int(np.count_nonzero(self._counts.column("steps")))

    def _enter(self, ids: Array, rows: Array) -> None:
        """Create rows for ids without a row, if admitted, and complete `rows`."""
        before = self._rows.count
        if self._counts is None:
            self._rows.insert(ids, rows, self.samples)
        else:
            absent = np.flatnonzero(rows < 0)
            absent = absent[self._admit(self._counts, ids[absent])]
            entering = rows[absent]
            self._rows.insert(ids[absent], entering, self.samples)
            rows[absent] = entering
        span = (self._rows.layout, before, self._rows.count)
        self._kernels.begin(*span, *self._initial, len(self._buffers), np.float32(self._filling))

    def _admit(self, counts: Records, ids: Array) -> Array:
        """Count pushes of ids without a row. Return bool [m]: True if this push creates a row."""
        rows, admitted = counts.find(ids), np.empty(len(ids), np.bool_)
        counts.insert(ids, rows, self.samples)
        needed = self.options.entry_count
        self.pending += self._kernels.count_pushes(
            counts.layout, rows, self.samples, needed, admitted
        )
        if counts.count > 2 * self.pending + SPARE_COUNTS:
            counts.sweep(0, least_steps=1)
        return admitted

    def _step(self, rows: Array, gradient: Array, lr: float, samples: int) -> None:
        optimizer, real = self.options.optimizer, np.float32
        given = (self._rows.layout, rows, self.samples, gradient)
        if isinstance(optimizer, Adam):
            beta1, beta2, epsilon = optimizer.beta1, optimizer.beta2, optimizer.epsilon
            decay = lr * optimizer.weight_decay
            self._kernels.adam_rows(*given, 1 / samples, lr, beta1, beta2, epsilon, decay)
        elif isinstance(optimizer, Adagrad):
            numbers = map(real, (1 / samples, lr, optimizer.epsilon))
            self._kernels.adagrad_rows(*given, *numbers)
        elif optimizer is None:
            self._kernels.sgd_rows(*given, real(-1))  # x - (-1) g, which is exact
        else:
            self._kernels.sgd_rows(*given, real(lr / samples))

    def _evict(self) -> None:
        """Evict cold rows and counts, at intervals of a quarter of `evict_after`."""
        after = self.options.evict_after
        if after is None or 4 * (self.samples - self._swept) < after:
            return
        self._swept = self.samples
        self.evicted += self._rows.sweep(self.samples - after + 1)
        if self._counts:
            self._counts.sweep(self.samples - after + 1, least_steps=1)
            self.pending = self._counts.count

    def _load(
        self,
        records: Records,
        keys: Mapping[str, str],
        contents: Mapping[str, Array],
        keep: Callable[[Array], Array],
    ) -> None:
        """Set the fields of records from `contents`."""
        ids = contents[keys["id"]]
        fields = {name: keys.get(name, name) for name in records.names[1:]}
        given = {
            name: contents[key]
            for name, key in fields.items()
            if name != "pushed" or key in contents
        }
        for first in range(0, len(ids), LOAD_CHUNK):
            chunk = np.ascontiguousarray(ids[first : first + LOAD_CHUNK], np.int64)
            mine = np.flatnonzero(keep(chunk))
            chunk = chunk[mine]
            rows = records.find(chunk)
            records.insert(chunk, rows, self.samples)
            records.set(rows, {name: values[first + mine] for name, values in given.items()})

    def _check(self, ids: Array, name: str, values: Array) -> None:
        required = {
            "ids": (ids, np.dtype(np.int64), (ids.size,)),
            name: (values, np.dtype(np.float32), (ids.size, self.options.width)),
        }
        for what, (array, dtype, shape) in required.items():
            if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
                raise UserError(
                    f"{self._name}: {what} must be {dtype} {list(shape)}, contiguous; "
                    f"it is {array.dtype} {list(array.shape)}, strides {list(array.strides)}"
                )
