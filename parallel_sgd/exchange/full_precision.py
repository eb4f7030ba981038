"""The sum of all ranks' vectors in their own precision, in rank order: the baseline."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..communication import Communicator
from ..kernels import array_module, empty_like
from ..parameters import Parameters
from .exchange import Residuals

Array = Any  #: a NumPy or CuPy array

ONE_MESSAGE = 1 << 15  #: up to so many bytes everybody gets everything: one collective, not two
IN_CACHE = 1 << 16  #: values that are summed at a time, so that the sum stays in cache


class FullPrecisionExchange:
    """Sums vectors of one layout over all ranks; nothing is lost.

    Unlike an all-reduce, whose order of summation is the MPI library's affair, the sum runs in
    rank order, so a run repeats bit for bit at a given number of ranks, on any MPI.

    Args:
        parameters: their layout.
        comm: the ranks.

    Memory: one buffer of about the vector's size. Creation is local.
    """

    def __init__(self, parameters: Parameters, comm: Communicator) -> None:
        self.comm = comm
        self.bytes_sent = 0  #: by this rank to others, over all exchanges so far
        flat, size = parameters.flat, comm.size
        self._small = flat.nbytes <= ONE_MESSAGE
        edges = np.arange(size + 1) * flat.size // size
        self._counts = [flat.size] * size if self._small else np.diff(edges).tolist()
        self._own = slice(int(edges[comm.rank]), int(edges[comm.rank + 1]))
        own = self._counts[comm.rank]
        self._received = empty_like(flat, size * own)
        to_owners = 0 if self._small else flat.size - own
        self._bytes_per_sum = (to_owners + (size - 1) * own) * flat.itemsize

    def sum(self, vector: Array, residuals: Residuals | None = None) -> None:
        """Replace `vector` by its sum over all ranks, the same bits on all.

        Args:
            vector: [n] of the parameters' dtype.
            residuals: there are none; the argument makes all exchanges alike.

        Collective: one call for vectors of up to 32 KiB, else two. Cost: sends 2·(K-1)/K·n values
        per rank (small vectors: (K-1)·n).
        """
        comm = self.comm
        self.bytes_sent += self._bytes_per_sum
        if self._small:
            comm.allgather(vector, self._received, self._counts)
            self._add(vector)
            return
        receive_counts = [self._counts[comm.rank]] * comm.size
        comm.alltoall(vector, self._counts, self._received, receive_counts)
        self._add(vector[self._own])
        comm.allgather(vector[self._own], vector, self._counts)

    def _add(self, total: Array) -> None:
        rows = self._received.reshape(self.comm.size, -1)
        step = IN_CACHE if array_module(total) is np else max(total.size, 1)
        for first in range(0, total.size, step):
            part = slice(first, first + step)
            total[part] = rows[0, part]
            for row in rows[1:]:
                total[part] += row[part]
