"""An exchange in two of the MPI library's own collectives, or one where the vector is short."""

from __future__ import annotations

from typing import Any

from ..communication import Communicator
from ..kernels import empty_like
from .residuals import Residuals
from .stages import PlainStages, Stages, add_in_order

Array = Any  #: a NumPy or CuPy array

ONE_MESSAGE = 1 << 15  #: up to so many bytes everybody gets everything: one collective, not two


class Collectives:
    """Sums one bucket; every rank sends to the owners itself.

    Args:
        stages: of the bucket, with every rank on a host of its own.
        comm: the ranks.

    Local.
    """

    def __init__(self, stages: Stages, like: Array, comm: Communicator) -> None:
        self.stages, self.comm = stages, comm
        size, values = comm.size, stages.bucket.values
        counts = stages.counts
        self._own = slice(sum(counts[: comm.rank]), sum(counts[: comm.rank + 1]))
        self._most = max(sum(counts), size * max(counts))
        self._all: Array = None  # every rank's values, where they are few
        nbytes = (values.stop - values.start) * like.itemsize
        if isinstance(stages, PlainStages) and nbytes <= ONE_MESSAGE:
            self._all = empty_like(like, size * (values.stop - values.start))
        self.bytes_sent = 0  #: by this rank to others, over all exchanges so far

    def sum(self, vector: Array, residuals: Residuals | None) -> None:
        """Replace the bucket of `vector` by its sum over all ranks, the same bits on all.

        Collective: two calls, or one.
        """
        stages, comm, own = self.stages, self.comm, self._own
        trace, counts, rank = comm.trace, stages.counts, comm.rank
        if self._all is not None:
            self._sum_short(vector[stages.bucket.values])
            return
        with trace.span("encode"):
            for piece in stages.pieces:
                stages.contribute(piece, vector, residuals)
        wire = stages.wire(vector)
        with trace.span("wire"):
            received = [counts[rank]] * comm.size
            comm.alltoall(wire, counts, stages.received, received, most=self._most)
        with trace.span("sum"):
            for piece in stages.pieces:
                if piece.owner == rank:
                    stages.total(piece, vector, residuals)
        with trace.span("wire"):
            comm.allgather(wire[own], wire, counts)
        with trace.span("decode"):
            for piece in stages.pieces:
                stages.take(piece, vector)
        sent = sum(counts) - counts[rank] + (comm.size - 1) * counts[rank]
        self.bytes_sent += sent * wire.itemsize

    def _sum_short(self, values: Array) -> None:
        comm = self.comm
        with comm.trace.span("wire"):
            comm.allgather(values, self._all, [values.size] * comm.size)
        rows = self._all.reshape(comm.size, -1)
        with comm.trace.span("sum"):
            each = [*rows[: comm.rank], values, *rows[comm.rank + 1 :]]
            add_in_order(each, comm.rank, max(1, len(values)))
        self.bytes_sent += (comm.size - 1) * values.nbytes
