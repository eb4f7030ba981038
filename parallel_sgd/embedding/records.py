"""Records found by id, in memory that grows without copies of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..kernels import memory, row_kernels

Array = npt.NDArray[Any]

MAX_LOAD = 0.75  #: largest fraction of used slots
GROWTH = 1.25  #: growth factor of the slots: between 0.6 and 0.75 of the slots are used
MIN_ROOM = 64  #: smallest capacity in records
MAX_RECORDS = 2**31 - 2


class Records:
    """A map from int64 ids to records of a single dtype. Local; not thread-safe.

    Records lie in chunks of `memory.LARGE` bytes. The first chunk grows by doubling. All later
    chunks have the full size, so growth moves no records. Slots of the hash index are rebuilt from
    the records, after the old slots are freed.
    """

    def __init__(
        self,
        counters: tuple[str, ...],
        vectors: tuple[str, ...] = (),
        width: int = 0,
        most: int = MAX_RECORDS,
    ) -> None:
        """Create an empty map.

        Args:
            counters: names of the int64 fields of a record, apart from its id: "pushed", "steps".
            vectors: names of the fields of `width` float32. The first, if any, is "values".
            width: number of values in a vector.
            most: the largest number of records.
        """
        self._most = most
        self._kernels = row_kernels()
        self.names = ("id", *counters, *vectors)
        formats = ["<i8"] * (1 + len(counters)) + [("<f4", (width,))] * len(vectors)
        sizes = [np.dtype(form).itemsize for form in formats]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        size = -(-sum(sizes) // 8) * 8
        self.dtype: np.dtype[Any] = np.dtype(
            {"names": self.names, "formats": formats, "offsets": offsets, "itemsize": size}
        )
        at = dict(zip(self.names, offsets, strict=True))
        self._offsets = [at.get(name, -1) for name in ("pushed", "steps", "values")]
        self._width = width
        self._shift = (-(-memory.LARGE // size) - 1).bit_length()
        self._chunks: list[Array] = []
        self._slots = memory.zeros(0, np.uint64)
        self.count = 0
        self._make_room(1)

    def find(self, ids: Array) -> Array:
        """Return the number of each id's record, or -1: int32 [m]."""
        rows = np.empty(len(ids), np.int32)
        self._kernels.find(self._slots, self.layout, ids, rows)
        return rows

    def insert(self, ids: Array, rows: Array, clock: int) -> None:
        """Create a record for every id with -1 in `rows`, and write its number to `rows`.

        Args:
            ids: int64 [m].
            rows: int32 [m], from `find`; changed.
            clock: of the last push, for records with a "pushed" field.

        The values of a new record are not set.
        """
        self._make_room(self.count + int(np.count_nonzero(rows < 0)))
        arguments = (self._slots, self.layout, ids, rows, self.count, clock)
        self.count = self._kernels.insert(*arguments)

    def sweep(self, oldest: int, least_steps: int = 0) -> int:
        """Remove records with a last push before `oldest`, or with fewer than `least_steps` steps.

        Returns:
            The number of removed records.
        """
        left = self._kernels.sweep(self.layout, self.count, oldest, least_steps)
        forgotten = self.count - int(left)
        if forgotten:
            self.count = int(left)
            del self._chunks[max(1, -(-self.count >> self._shift)) :]
            self._settle_layout()
            self._make_slots(int(GROWTH / MAX_LOAD * self.count))
        return forgotten

    def column(self, name: str) -> Array:
        """Return a compact copy of a field of all records."""
        field = self.dtype[name]
        out = np.empty((self.count, *field.shape), field.base)
        for number, chunk in enumerate(self._chunks):
            part = out[number << self._shift :]
            part[: len(chunk)] = chunk[name][: len(part)]
        return out

    def set(self, rows: Array, fields: dict[str, Array]) -> None:
        """Set fields of records.

        Args:
            rows: int32 [m], numbers of the records.
            fields: arrays [m, ...] by field name.
        """
        for number in np.unique(rows >> self._shift):
            here = np.flatnonzero(rows >> self._shift == number)
            places = rows[here] & ((1 << self._shift) - 1)
            for name, values in fields.items():
                self._chunks[number][name][places] = values[here]

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes + sum(chunk.nbytes for chunk in self._chunks)

    def _make_room(self, count: int) -> None:
        """Make room for `count` records, in chunks and slots."""
        if count > self._most:
            raise UserError(f"{count} rows on one server: at most {self._most} are possible")
        whole = 1 << self._shift
        if len(self._chunks) <= 1:
            room = len(self._chunks[0]) if self._chunks else 0
            if room < min(count, whole):
                grown = self._new_chunk(min(whole, max(MIN_ROOM, 1 << (count - 1).bit_length())))
                grown[: self.count] = self._chunks[0][: self.count] if self._chunks else 0
                self._chunks = [grown]
        while len(self._chunks) * whole < count and len(self._chunks[0]) == whole:
            self._chunks.append(self._new_chunk(whole))
        self._settle_layout()
        if count > MAX_LOAD * len(self._slots):
            self._make_slots(int(max(count / MAX_LOAD, GROWTH * len(self._slots))) + 1)

    def _new_chunk(self, size: int) -> Array:
        return memory.empty(size * self.dtype.itemsize, np.uint8).view(self.dtype)

    def _make_slots(self, size: int) -> None:
        self._slots = memory.zeros(0, np.uint64)  # the old ones go first
        self._slots = memory.zeros(max(size, 2 * MIN_ROOM), np.uint64)
        self._kernels.index(self._slots, self.layout, self.count)

    def _settle_layout(self) -> None:
        """Update the kernels' addresses of the chunks. The chunks must not move afterwards."""
        places = np.array([chunk.ctypes.data for chunk in self._chunks])
        size = self.dtype.itemsize
        self.layout = self._kernels.Layout(places, self._shift, size, *self._offsets, self._width)
