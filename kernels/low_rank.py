"""The product of two thin matrices, in Numba."""

from __future__ import annotations

from .compiled import compiled
from .reference import Array


@compiled
def low_rank_product(p: Array, q: Array, out: Array, rank: int, subtract: bool) -> None:
    rows, columns = len(p) // rank, len(q) // rank
    for i in range(rows):
        row = out[i * columns : (i + 1) * columns]  # stays in the first-level cache
        if not subtract:
            row[:] = 0
        for k in range(rank):
            p_ik, q_k = p[k * rows + i], q[k * columns : (k + 1) * columns]
            if subtract:
                for j in range(columns):
                    row[j] -= p_ik * q_k[j]
            else:
                for j in range(columns):
                    row[j] += p_ik * q_k[j]
