"""Operations on row ids: mixing, removing duplicates, and assigning ids to servers.

Array in, array out; CPU only. Results depend on the arguments alone, on every platform.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .compiled import compiled
from .reference import Array

I64, U64 = np.int64, np.uint64


@compiled
def mix(number: int) -> Any:
    """Return a uint64 in which every bit depends on all bits of `number`.

    The function is one to one and deterministic. Source: Steele, Lea & Flood, OOPSLA 2014: the step
    of SplitMix64 from `number`.
    """
    z = U64(number) + U64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    return z ^ (z >> U64(31))


def unique(ids: Array) -> tuple[Array, Array]:
    """Return the distinct ids in the order of first appearance, and each id's position in these.

    Args:
        ids: int64 [m], of any shape; unchanged.
    Returns:
        distinct int64 [u], inverse int32 [m]: ``distinct[inverse]`` are the ids.

    Cost: faster than `numpy.unique`, which sorts.
    """
    flat = ids.reshape(-1)
    distinct, inverse = np.empty(flat.size, I64), np.empty(flat.size, np.int32)
    slots = np.zeros(1 << max(2 * flat.size - 1, 1).bit_length(), np.int32)
    count = _unique(flat, slots, distinct, inverse)
    return distinct[:count].copy(), inverse


@compiled
def _unique(ids: Array, slots: Array, distinct: Array, inverse: Array) -> Any:
    mask, count = len(slots) - 1, 0
    for i in range(len(ids)):
        at = I64(mix(U64(ids[i])) >> U64(20)) & mask
        while slots[at] > 0 and distinct[slots[at] - 1] != ids[i]:
            at = (at + 1) & mask
        if slots[at] == 0:
            distinct[count] = ids[i]
            count += 1
            slots[at] = count
        inverse[i] = slots[at] - 1
    return count


@compiled
def sum_rows(inverse: Array, gradient: Array, out: Array) -> None:
    """Set out[inverse[i]] += gradient[i] in the order of i, starting from zeros.

    Args:
        inverse: int32 [m], of `unique`.
        gradient: float32 [m, width].
        out: float32 [u, width], written.
    """
    out[:] = 0
    for i in range(len(inverse)):
        for column in range(out.shape[1]):
            out[inverse[i], column] += gradient[i, column]


@compiled
def take_rows(rows: Array, inverse: Array, out: Array) -> None:
    """Set out[i] = rows[inverse[i]].

    Args:
        rows: float32 [u, width].
        inverse: int32 [m], of `unique`.
        out: float32 [m, width], written.
    """
    for i in range(len(inverse)):
        for column in range(out.shape[1]):
            out[i, column] = rows[inverse[i], column]


@compiled
def server_of(ids: Array, servers: int) -> Array:
    """Return int32 [m], the server of each id.

    Uses different bits of the hash than the search for a row on a server.
    """
    owners = np.empty(len(ids), np.int32)
    for i in range(len(ids)):
        owners[i] = (mix(U64(ids[i])) & U64(0xFFFFFFFF)) % U64(servers)
    return owners


@compiled
def partition(ids: Array, servers: int) -> tuple[Array, Array]:
    """Sort ids by server, keeping their order for each server.

    Args:
        ids: int64 [m].
        servers: the number of servers.
    Returns:
        order int64 [m], starts int64 [servers + 1]: the ids of server s are
        ``ids[order[starts[s]:starts[s + 1]]]``.
    """
    of = server_of(ids, servers)
    starts = np.zeros(servers + 1, I64)
    for i in range(len(ids)):
        starts[of[i] + 1] += 1
    for server in range(servers):
        starts[server + 1] += starts[server]
    order, next_place = np.empty(len(ids), I64), starts[:-1].copy()
    for i in range(len(ids)):
        order[next_place[of[i]]] = i
        next_place[of[i]] += 1
    return order, starts
