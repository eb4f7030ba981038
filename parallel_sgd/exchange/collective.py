"""The exchange with MPI's all-to-all and all-gather, or a single all-gather for a short bucket."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import runtime
from ..communication import Communicator
from ..kernels import array_module, empty_like
from .layout import Piece, Topology
from .reduction import PlainReduction, Reduction
from .residuals import Residuals
from .transport import IsReady, ReductionsOver, Transport
from .variable_length import VariableLengthReduction, shares_step_sizes

Array = Any  #: a NumPy or CuPy array

ONE_COLLECTIVE_BYTES = 1 << 15  #: up to this size, a bucket takes one all-gather
LENGTH_BYTES = 8  #: of a message with the length of the next message
POLL_S = 5e-4  #: between two polls of `is_ready`


class Collective(Transport):
    """Sums bucket by bucket; every rank sends to the owners directly.

    The topology must be flat. Creation is local.
    """

    def __init__(self, reductions: ReductionsOver, topology: Topology, comm: Communicator) -> None:
        assert not topology.hierarchical
        self.reductions, self._comm = reductions(topology), comm
        self._short = [
            ShortSum(reduction.values, reduction.received, comm)
            if comm.size > 1 and _is_short(reduction)
            else None
            for reduction in self.reductions
        ]
        #: For every bucket: this rank's part of the wire, and the longest message of any rank.
        self._parts = [
            (
                slice(begin := sum(counts[: comm.rank]), begin + counts[comm.rank]),
                max(sum(counts), comm.size * max(counts)),
            )
            for counts in (reduction.counts for reduction in self.reductions)
        ]

        #: The last of the buckets that share step sizes. Sums are encoded after this bucket,
        #: because the step sizes depend on all of them.
        last_with = {
            reduction.step_sizes: number
            for number, reduction in enumerate(self.reductions)
            if isinstance(reduction, VariableLengthReduction)
        }
        self._last_with_steps = {*last_with.values()}
        self._steps_are_shared = shares_step_sizes(self.reductions)

    def sum(self, vector: Array, residuals: Residuals | None, is_ready: IsReady | None) -> int:
        """See `Transport`. Sums bucket by bucket.

        Makes two collective calls per bucket, one if the bucket is short, and four with an entropy
        code, whose message lengths are sent first. Makes no calls on a single rank.
        """
        bytes_sent = 0
        added_up: list[VariableLengthReduction] = []
        if self._steps_are_shared:
            _wait_until(is_ready, len(self.reductions))
            is_ready = None
        for number, reduction in enumerate(self.reductions):
            _wait_until(is_ready, number + 1, after=number)
            short = self._short[number]
            if isinstance(reduction, VariableLengthReduction):
                most = self._parts[number][1]
                bytes_sent += self._reduce_scatter(reduction, vector, residuals, most)
                added_up.append(reduction)
                if number in self._last_with_steps:
                    for earlier in added_up:
                        bytes_sent += self._all_gather(earlier, vector, residuals)
                    added_up.clear()
            elif short is not None:
                bytes_sent += short(vector)
            elif self._comm.size == 1:
                self._sum_single_rank(reduction, vector, residuals)
            else:
                bytes_sent += self._sum(reduction, vector, residuals, *self._parts[number])
        return bytes_sent

    def _sum(
        self,
        reduction: Reduction,
        vector: Array,
        residuals: Residuals | None,
        part: slice,
        most: int,
    ) -> int:
        """Sum a bucket by a reduce-scatter and an all-gather."""
        comm, trace, counts = self._comm, self._comm.trace, reduction.counts
        own = counts[comm.rank]
        with trace.span("encode"):
            for piece in reduction.pieces:
                reduction.encode(piece, vector, residuals)
        wire = reduction.wire(vector)
        with trace.span("wire"):
            comm.alltoall(wire, counts, reduction.received, [own] * comm.size, most=most)
        with trace.span("sum"):
            for piece in reduction.pieces:
                if piece.owner == comm.rank:
                    reduction.reduce(piece, vector, residuals)
        with trace.span("wire"):
            comm.allgather(wire[part], wire, counts)
        with trace.span("decode"):
            for piece in reduction.pieces:
                reduction.decode(piece, vector)
        sent: int = (wire.size - own + (comm.size - 1) * own) * wire.itemsize
        return sent

    def _reduce_scatter(
        self,
        reduction: VariableLengthReduction,
        vector: Array,
        residuals: Residuals | None,
        most: int,
    ) -> int:
        """Exchange message lengths, then reduce-scatter. Return the bytes sent."""
        comm, trace, payload = self._comm, self._comm.trace, reduction.payload
        sent_counts, at = np.zeros(comm.size, np.int64), 0
        with trace.span("encode"):
            for piece in reduction.pieces:  # in the order of owners
                room = payload[at : at + _room(piece)]
                length = reduction.encode(piece, vector, residuals, room).size
                sent_counts[piece.owner] += length
                at += length
        received, received_counts, ones = payload[:at], sent_counts.copy(), [1] * comm.size
        if comm.size > 1:
            with trace.span("wire"):
                comm.alltoall(sent_counts, ones, received_counts, ones)
                received = reduction.received[: int(received_counts.sum())]
                counts = sent_counts.tolist(), received_counts.tolist()
                comm.alltoall(payload[:at], counts[0], received, counts[1], most=most)
        with trace.span("sum"):
            ends = np.cumsum(received_counts)
            begins = (ends - received_counts).tolist()
            for piece in reduction.own_pieces:
                messages = [received[begin:] for begin in begins]
                lengths = reduction.add_up(piece, residuals, messages)
                begins = [begin + length for begin, length in zip(begins, lengths, strict=True)]
        return (comm.size - 1) * LENGTH_BYTES + at - int(sent_counts[comm.rank])

    def _all_gather(
        self, reduction: VariableLengthReduction, vector: Array, residuals: Residuals | None
    ) -> int:
        """Exchange message lengths, then all-gather. Return the bytes sent."""
        comm, trace, payload = self._comm, self._comm.trace, reduction.payload
        own, at = reduction.received, 0
        with trace.span("encode"):
            for piece in reduction.own_pieces:
                at += reduction.encode_sum(piece, residuals, own[at : at + _room(piece)]).size
        sums = own
        if comm.size > 1:
            counts = np.zeros(comm.size, np.int64)
            with trace.span("wire"):
                comm.allgather(np.array([at], np.int64), counts, [1] * comm.size)
                sums = payload[: int(counts.sum())]
                comm.allgather(own[:at], sums, counts.tolist())
        with trace.span("decode"):
            begin = 0
            for piece in reduction.pieces:
                begin += reduction.decode(piece, vector, sums[begin:])
        return (comm.size - 1) * (LENGTH_BYTES + at)

    def _sum_single_rank(
        self, reduction: Reduction, vector: Array, residuals: Residuals | None
    ) -> None:
        """Pass the values through the codec, if any, although nothing is sent."""
        if isinstance(reduction, PlainReduction):
            return
        trace = self._comm.trace
        for piece in reduction.pieces:
            with trace.span("encode"):
                reduction.encode(piece, vector, residuals)
            with trace.span("sum"):
                reduction.reduce(piece, vector, residuals)
            with trace.span("decode"):
                reduction.decode(piece, vector)


class ShortSum:
    """Sums a short, uncompressed bucket: each rank gathers the values of all ranks and adds them.

    Args:
        values: the bucket's slice of the vector.
        like: an array of the vector's kind.
        comm: the ranks, more than one.
    """

    def __init__(self, values: slice, like: Array, comm: Communicator) -> None:
        size = values.stop - values.start
        self._values, self._comm, self._counts = values, comm, [size] * comm.size
        self._gathered = empty_like(like, comm.size * size)
        self._rows = [*self._gathered.reshape(comm.size, -1)]
        self._add = array_module(like).add

    def __call__(self, vector: Array) -> int:
        """Sum in rank order and return the bytes sent by this rank."""
        comm, rows, values = self._comm, self._rows, vector[self._values]
        own = rows[comm.rank]
        own[...] = values
        with comm.trace.span("wire"):
            comm.allgather(own, self._gathered, self._counts)
        with comm.trace.span("sum"):
            self._add(rows[0], rows[1], out=values)
            for row in rows[2:]:
                self._add(values, row, out=values)
        sent: int = (comm.size - 1) * values.nbytes
        return sent


def _wait_until(is_ready: IsReady | None, buckets: int, *, after: int = 0) -> None:
    """Poll until the buckets from number `after` to `buckets` - 1 are ready."""
    if is_ready is not None:
        for number in range(after, buckets):
            # bounded: for this rank's own backward
            while not is_ready(number):
                runtime.sleep(POLL_S)


def _room(piece: Piece) -> int:
    room: int = piece.bytes.stop - piece.bytes.start
    return room


def _is_short(reduction: Reduction) -> bool:
    size = reduction.values.stop - reduction.values.start
    plain = isinstance(reduction, PlainReduction)
    return plain and size * reduction.received.itemsize <= ONE_COLLECTIVE_BYTES
