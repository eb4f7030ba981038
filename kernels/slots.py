"""A hash table that finds records by id: open addressing. Array in, array out; CPU only.

*Records* lie side by side in chunks of equal size, in the order of insertion. A record holds all
data of an id (counters, values, optimizer state), and so takes a single place in memory. *Slots*
point to records, with linear probing:

    slot = hash << 32 | number of the record + 1,  or 0: free
    hash = upper half of mix(id);  the search begins at hash * slots >> 32

Since a slot holds the hash, a search almost never touches a wrong record. Memory has a long latency
but answers many requests in parallel: ids are processed in groups, and each stage prefetches the
data of the next stage.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .compiled import compiled
from .ids import mix
from .pointers import address_of, get_int, prefetch, set_int
from .reference import Array

I64, U64 = np.int64, np.uint64

GROUP = 32  #: ids processed together, to overlap their memory accesses
LINE = 64


class Layout(NamedTuple):
    """The layout of records in memory. Offsets are in bytes; -1: this table has no such field.

    A record begins with its id. All fields before the values are int64.
    """

    chunks: Array  #: int64 [chunks], addresses
    shift: int  #: a chunk holds 2**shift records
    size: int  #: of a record, a multiple of 8
    pushed: int  #: offset of the clock of the last push
    steps: int  #: offset of the number of pushes
    values: int  #: offset of the values, float32 [width]; the optimizer's buffers follow
    width: int


@compiled
def place_of(records: Layout, row: int) -> Any:
    inside = I64(row) & ((I64(1) << I64(records.shift)) - I64(1))
    return records.chunks[I64(row) >> I64(records.shift)] + inside * I64(records.size)


@compiled
def fetch(records: Layout, row: int, size: int) -> None:
    place = place_of(records, row)
    for byte in range(0, size, LINE):
        prefetch(place + byte)


@compiled
def _hash(number: int) -> Any:
    return mix(U64(number)) >> U64(32)


@compiled
def _home(hashed: int, slots: Array) -> Any:
    return I64((hashed * U64(len(slots))) >> U64(32))


@compiled
def _search(slots: Array, records: Layout, number: int, hashed: int) -> tuple[Any, Any]:
    """Return the record of an id, or -1, and the slot with the id or for inserting it."""
    at = _home(hashed, slots)
    while slots[at] != U64(0):
        if slots[at] >> U64(32) == hashed:
            row = I64(slots[at] & U64(0xFFFFFFFF)) - I64(1)
            if get_int(place_of(records, row)) == number:
                return row, at
        at = at + 1 if at + 1 < len(slots) else 0
    return I64(-1), at


@compiled
def find(slots: Array, records: Layout, ids: Array, rows: Array) -> None:
    """Set rows[i] to the record number of ids[i], or -1.

    Args:
        ids: int64 [m].
        rows: int32 [m], written.

    Cost: two cache misses per row.
    """
    hashes = np.empty(GROUP, U64)
    base = address_of(slots)
    for first in range(0, len(ids), GROUP):
        n = min(GROUP, len(ids) - first)
        for i in range(n):
            hashes[i] = _hash(ids[first + i])
            prefetch(base + 8 * _home(hashes[i], slots))
        for i in range(n):  # the first slot with this hash: nearly always the right slot
            at, row = _home(hashes[i], slots), I64(-1)
            while slots[at] != U64(0):
                if slots[at] >> U64(32) == hashes[i]:
                    row = I64(slots[at] & U64(0xFFFFFFFF)) - I64(1)
                    prefetch(place_of(records, row))
                    break
                at = at + 1 if at + 1 < len(slots) else 0
            rows[first + i] = row
        for i in range(n):
            row, number = I64(rows[first + i]), ids[first + i]
            if row >= 0 and get_int(place_of(records, row)) != number:
                row, at = _search(slots, records, number, hashes[i])
                rows[first + i] = row


@compiled
def insert(slots: Array, records: Layout, ids: Array, rows: Array, count: int, clock: int) -> Any:
    """Create records for ids without a record: numbers from `count` on, in the order of the ids.

    Args:
        slots, records: with room for the new records; changed.
        ids: int64 [m].
        rows: int32 [m], from `find`; each -1 is replaced.
        count: the number of records so far.
        clock: of this push, stored in new records if the layout has that field.
    Returns:
        The new number of records. All fields of the new records are set except the values.
    """
    base = address_of(slots)
    for i in range(len(ids)):
        if i + 8 < len(ids) and rows[i + 8] < 0:
            prefetch(base + 8 * _home(_hash(ids[i + 8]), slots))
        if rows[i] >= 0:
            continue
        hashed = _hash(ids[i])
        row, at = _search(slots, records, ids[i], hashed)
        if row < 0:
            row = I64(count)
            count += 1
            slots[at] = (hashed << U64(32)) | U64(row + 1)
            place = place_of(records, row)
            set_int(place, ids[i])
            if records.pushed >= 0:
                set_int(place + records.pushed, clock)
            if records.steps >= 0:
                set_int(place + records.steps, 0)
        rows[i] = row
    return count


@compiled
def index(slots: Array, records: Layout, count: int) -> None:
    """Insert `count` records, all with different ids, into free slots."""
    base = address_of(slots)
    hashes = np.empty(GROUP, U64)
    for first in range(0, count, GROUP):
        n = min(GROUP, count - first)
        for i in range(n):
            hashes[i] = _hash(get_int(place_of(records, first + i)))
            prefetch(base + 8 * _home(hashes[i], slots))
        for i in range(n):
            at = _home(hashes[i], slots)
            while slots[at] != U64(0):
                at = at + 1 if at + 1 < len(slots) else 0
            slots[at] = (hashes[i] << U64(32)) | U64(first + i + 1)


@compiled
def touch(records: Layout, rows: Array, i: int, clock: int) -> Any:
    """Return the record of the i-th row, after updating its clock and step count.

    Later records are prefetched.
    """
    if i + GROUP < len(rows) and rows[i + GROUP] >= 0:
        fetch(records, rows[i + GROUP], records.size)
    if rows[i] >= 0:
        place = place_of(records, rows[i])
        if records.pushed >= 0:
            set_int(place + records.pushed, clock)
        if records.steps >= 0:
            set_int(place + records.steps, get_int(place + records.steps) + 1)
    return I64(rows[i])


@compiled
def count_pushes(records: Layout, rows: Array, clock: int, needed: int, admitted: Array) -> Any:
    """Count a push of every record. Admit a record at `needed` pushes, and reset its count to 0.

    Args:
        rows: int32 [m], all different and at least 0.
        admitted: bool [m], written.
    Returns:
        The change in the number of records with a count above 0.
    """
    more = 0
    for i in range(len(rows)):
        place = place_of(records, touch(records, rows, i, clock)) + records.steps
        more += 1 if get_int(place) == 1 else 0
        admitted[i] = get_int(place) >= needed
        if admitted[i]:
            set_int(place, 0)
            more -= 1
    return more


@compiled
def sweep(records: Layout, count: int, oldest: int, least_steps: int) -> Any:
    """Remove records last pushed before `oldest`, or with fewer than `least_steps` steps.

    The remaining records are moved together.

    Returns:
        The number of remaining records, in their old order. The slots are not updated.
    """
    left = 0
    for row in range(count):
        place = place_of(records, row)
        cold = records.pushed >= 0 and get_int(place + records.pushed) < oldest
        if cold or (records.steps >= 0 and get_int(place + records.steps) < least_steps):
            continue
        if left < row:
            to = place_of(records, left)
            for byte in range(0, records.size, 8):
                set_int(to + byte, get_int(place + byte))
        left += 1
    return left
