"""Kernels for embedding tables: rows of float32, found by ids. Array in, array out; CPU only.

This module also exports `ids` and `slots`. The update rules are those of `steps`, row by row, with
the same values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from . import steps as dense
from .compiled import compiled
from .ids import mix, partition, server_of, sum_rows, take_rows, unique
from .pointers import floats_at, get_int
from .reference import Array
from .slots import GROUP, Layout, count_pushes, fetch, find, index, insert, place_of, sweep, touch

__all__ = [
    "Layout",
    "adagrad_rows",
    "adam_rows",
    "begin",
    "count_pushes",
    "find",
    "index",
    "initial_row",
    "insert",
    "partition",
    "read",
    "server_of",
    "sgd_rows",
    "sum_rows",
    "sweep",
    "take_rows",
    "unique",
]

I32, I64, U64 = np.int32, np.int64, np.uint64
F32 = np.float32


@compiled
def _values(records: Layout, row: int, buffer: int) -> Any:
    """Return the values of a row (buffer 0), or its optimizer's buffer 1 or 2."""
    offset = I64(records.values) + I64(4) * I64(buffer) * I64(records.width)
    return carray(floats_at(place_of(records, row) + offset), (records.width,))


@compiled
def initial_row(seed: int, number: int, scale: float, out: Array) -> None:
    """Set a row's initial values, uniform in (-scale, scale), from seed, id and column alone.

    key = mix(mix(seed) ^ id);  k = upper 23 bits of mix(key + column + 1)
    value = scale * (2k + 1 - 2**23) / 2**23
    """
    key = mix(mix(U64(seed)) ^ U64(number))
    unit = scale * F32(2.0**-23)
    for column in range(len(out)):
        k = I32(mix(key + U64(column + 1)) >> U64(41))
        out[column] = F32(I32(2) * k + I32(1 - 2**23)) * unit


@compiled
def begin(
    records: Layout, first: int, last: int, seed: int, scale: float, buffers: int, filling: float
) -> None:
    """Set the initial values of new records, and fill their optimizer buffers with `filling`."""
    for row in range(first, last):
        initial_row(seed, get_int(place_of(records, row)), scale, _values(records, row, 0))
        for buffer in range(1, buffers + 1):
            kept = _values(records, row, buffer)
            for column in range(len(kept)):
                kept[column] = filling


@compiled
def read(records: Layout, ids: Array, rows: Array, seed: int, scale: float, out: Array) -> None:
    """Set out[i] to the values of record rows[i], or if rows[i] is -1 to new values of ids[i].

    New values are those of `initial_row`.
    """
    size = records.values + 4 * records.width
    for i in range(len(rows)):
        if i + GROUP < len(rows) and rows[i + GROUP] >= 0:
            fetch(records, rows[i + GROUP], size)
        if rows[i] >= 0:
            values = _values(records, rows[i], 0)
            for column in range(len(values)):
                out[i, column] = values[column]
        else:
            initial_row(seed, ids[i], scale, out[i])


@compiled
def sgd_rows(records: Layout, rows: Array, clock: int, gradient: Array, lr: float) -> None:
    """Apply `steps.sgd_step` to every record rows[i] >= 0, with gradient[i]."""
    for i in range(len(rows)):
        row = touch(records, rows, i, clock)
        if row >= 0:
            dense._sgd_step(_values(records, row, 0), gradient[i], lr)


@compiled
def adagrad_rows(
    records: Layout,
    rows: Array,
    clock: int,
    gradient: Array,
    scale: float,
    lr: float,
    epsilon: float,
) -> None:
    """Apply `steps.adagrad_step` to every record rows[i] >= 0, with gradient[i]."""
    for i in range(len(rows)):
        row = touch(records, rows, i, clock)
        if row >= 0:
            x, s = _values(records, row, 0), _values(records, row, 1)
            dense._adagrad_step(x, s, gradient[i], scale, lr, epsilon)


@compiled
def adam_rows(
    records: Layout,
    rows: Array,
    clock: int,
    gradient: Array,
    scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
) -> None:
    """Apply `optimizers.Adam` to every record rows[i] >= 0, with gradient[i] and the row's steps.

    Args:
        scale, lr, beta1, beta2, epsilon, decay: float64, for bias correction.
    """
    weight1, weight2 = F32(1 - beta1), F32(1 - beta2)
    for i in range(len(rows)):
        row = touch(records, rows, i, clock)
        if row < 0:
            continue
        steps = float(get_int(place_of(records, row) + records.steps))
        bias1, bias2 = 1 - beta1**steps, np.sqrt(1 - beta2**steps)  # floats, as in Python
        rate, root = F32(lr * bias2 / bias1), F32(epsilon * bias2)
        x, m, v = _values(records, row, 0), _values(records, row, 1), _values(records, row, 2)
        dense._adam_step(x, m, v, gradient[i], F32(scale), rate, weight1, weight2, root, F32(decay))
