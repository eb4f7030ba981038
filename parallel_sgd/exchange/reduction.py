"""The arithmetic of an exchange: the computations between messages. No communication.

    values         of rank k                      g_k
    local_sum      its host h, in rank order      s_h = Σ_(k in h) g_k
    encode         for the owner                  m_h = Encode(s_h + worker_error)
    reduce         the owner, in host order       g   = Σ_h Decode(m_h)
                   for all ranks                  m   = Encode(g + owner_error)
    decode         all ranks                      g'  = Decode(m)

This is a reduce-scatter and an all-gather with compressed messages. The error of a message stays
with its sender, so that over any number of steps

    sum of all g' + sum of owner_error + sum of worker_error == sum of all g_k

to rounding (docs/algorithms.md; Seide et al. 2014, §3.3). A plain all-reduce of quantized gradients
would lose the owners' error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..compression import Codec
from ..kernels import Blocks, array_module, empty_like
from .layout import CutBucket, Piece, Topology
from .residuals import Residuals

Array = Any  #: a NumPy or CuPy array

IN_CACHE = 1 << 16  #: values summed at a time on a CPU, so that the sum stays in cache
ALL_AT_ONCE = 1 << 62  #: values summed at a time on a GPU


class Reduction(ABC):
    """The computations on the pieces of one bucket, with their buffers.

    Args:
        cut: the bucket.
        like: an array of the vector's kind.
        rank: the rank to allocate buffers for.
        topology: the hosts of the ranks.
        dtype: of messages.

    Attributes:
        name: of the bucket in `Residuals.owner_error`.
        values, stripes: see `CutBucket`.
        pieces: the pieces whose owners the topology lists, in the order of the vector.
        own: this rank's stripe, as a slice of the vector.
        counts: the length of each rank's part of `wire`.
        received: a receive buffer for this rank's stripe from each host.

    Local.
    """

    def __init__(
        self, cut: CutBucket, like: Array, rank: int, topology: Topology, dtype: Any
    ) -> None:
        self.name, self.values = str(cut.number), cut.values
        self.stripes = cut.stripes
        self.pieces = [piece for piece in cut.pieces if topology.has(piece.owner)]
        self.rank, self.topology = rank, topology
        self.host, self.hosts = topology.host_of[rank], range(len(topology.hosts))
        self.local_ranks = topology.hosts[self.host]
        self.local_peers = [peer for peer in self.local_ranks if peer != rank]
        self.own = cut.stripes[rank].values
        self._itemsize = np.dtype(dtype).itemsize
        self.counts = [
            (stripe.bytes.stop - stripe.bytes.start) // self._itemsize for stripe in cut.stripes
        ]
        self.received = empty_like(like, len(self.hosts) * self.counts[rank], dtype)
        self._rows = self.received.reshape(len(self.hosts), -1)
        self._own_begin = sum(self.counts[:rank])
        self._room_begin, room = {}, 0
        for piece in self.pieces:
            if self.leads(piece):
                self._room_begin[piece.tag] = room
                room += piece.size
        peers = len(self.local_peers)
        self._room = empty_like(like, room * peers).reshape(peers, room)
        self._at_a_time = IN_CACHE if array_module(like) is np else ALL_AT_ONCE

    def leads(self, piece: Piece) -> bool:
        """Return True if this rank is the local leader of a piece."""
        return self.topology.local_leader(self.host, piece.owner) == self.rank

    @abstractmethod
    def wire(self, vector: Array) -> Array:
        """Return the buffer for the messages of all pieces, stripe after stripe; see `counts`."""

    def values_buffer(self, piece: Piece, peer: int) -> Array:
        """Return the local leader's receive buffer for the values of a rank of its host."""
        begin = self._room_begin[piece.tag]
        return self._room[self.local_peers.index(peer), begin : begin + piece.size]

    def encoded_buffer(self, piece: Piece, host: int) -> Array:
        """Return the owner's receive buffer for the message of a host."""
        place = self._place(piece)
        return self._rows[host, place.start - self._own_begin : place.stop - self._own_begin]

    def reduced_buffer(self, piece: Piece, vector: Array) -> Array:
        """Return the receive buffer of the sum.

        This is also the buffer of this rank's own message, and in use until the message is sent.
        """
        return self.wire(vector)[self._place(piece)]

    def local_sum(self, piece: Piece, vector: Array) -> None:
        """At the local leader, add the values of this host's ranks into `vector`, in rank order."""
        own = vector[piece.values]
        terms = [
            own if rank == self.rank else self.values_buffer(piece, rank)
            for rank in self.local_ranks
        ]
        add_in_order(terms, self.local_ranks.index(self.rank), self._at_a_time)

    @abstractmethod
    def encode(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        """Encode this host's sum for the owner, at the local leader. Return the message."""

    @abstractmethod
    def reduce(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        """Add the messages of all hosts, at the owner. Return the sum, encoded for all ranks."""

    @abstractmethod
    def decode(self, piece: Piece, vector: Array) -> object:
        """Write the received sum into `vector`."""

    def _place(self, piece: Piece) -> slice:
        """Return the slice of a piece's message in `wire`."""
        return slice(piece.bytes.start // self._itemsize, piece.bytes.stop // self._itemsize)


class CompressedReduction(Reduction):
    """Encodes with a codec and error feedback.

    Memory for n values of b bits on K hosts: buffers of about 2n·b/8 bytes.
    """

    def __init__(
        self, cut: CutBucket, like: Array, rank: int, topology: Topology, codec: Codec
    ) -> None:
        super().__init__(cut, like, rank, topology, np.uint8)
        self.codec = codec
        self.payload = empty_like(like, sum(self.counts), np.uint8)
        blocks, self._total = ALL_AT_ONCE, None
        if self._at_a_time == IN_CACHE:
            blocks = max(1, IN_CACHE // codec.block_size)
            self._total = empty_like(like, blocks * codec.block_size)
        self._in_cache = {
            piece.tag: _cut(piece, blocks) for piece in self.pieces if piece.owner == self.rank
        }

    def wire(self, vector: Array) -> Array:
        return self.payload

    def encode(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        assert residuals is not None
        values, error = vector[piece.values], residuals.worker_error[piece.values]
        message = self.payload[piece.bytes]
        # message <- Encode(values + error)
        # error   <- values + error - Decode(message)
        self.codec.encode(piece.blocks, values, error, message)
        return message

    def reduce(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        assert residuals is not None
        codec, owner_error = self.codec, residuals.owner_error[self.name]
        for blocks, values, place in self._in_cache[piece.tag]:
            total, message = vector[values], self.payload[place]
            if self._total is not None:  # it stays in cache; `decode` fills the vector later
                total = self._total[: total.size]
            within = slice(place.start - self._own_begin, place.stop - self._own_begin)
            error = owner_error[values.start - self.own.start : values.stop - self.own.start]
            # total   <- sum of Decode(the message of each host), including this host
            # message <- Encode(total + error)
            # error   <- total + error - Decode(message)
            for host in self.hosts:
                encoded = message if host == self.host else self._rows[host, within]
                codec.decode(blocks, encoded, total, add=host > 0)
            codec.encode(blocks, total, error, message)
        return self.payload[piece.bytes]

    def decode(self, piece: Piece, vector: Array) -> None:
        # values <- Decode(message)
        self.codec.decode(piece.blocks, self.payload[piece.bytes], vector[piece.values], add=False)


class PlainReduction(Reduction):
    """Sends the values unchanged, without loss.

    Memory: a buffer of about the vector's size.
    """

    def __init__(self, cut: CutBucket, like: Array, rank: int, topology: Topology) -> None:
        super().__init__(cut, like, rank, topology, like.dtype)

    def wire(self, vector: Array) -> Array:
        return vector[self.values]

    def encode(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        return vector[piece.values]

    def reduce(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        total = vector[piece.values]
        terms = [
            total if host == self.host else self.encoded_buffer(piece, host) for host in self.hosts
        ]
        add_in_order(terms, self.host, self._at_a_time)
        return total

    def decode(self, piece: Piece, vector: Array) -> None:
        pass  # the sum was received into `vector` directly


def add_in_order(arrays: Sequence[Array], place: int, at_a_time: int) -> None:
    """Set ``arrays[place] = arrays[0] + arrays[1] + …``, added from left to right. Local.

    Args:
        arrays: [n] each; those before `place` are changed.
        place: the index of the result.
        at_a_time: the number of values added at a time, so that the sum stays in cache.
    """
    for first in range(0, arrays[place].size, at_a_time):
        terms = [array[first : first + at_a_time] for array in arrays]
        for term in terms[1:place]:
            terms[0] += term
        if place:
            array_module(terms[0]).add(terms[0], terms[place], out=terms[place])
        for term in terms[place + 1 :]:
            terms[place] += term


def _cut(piece: Piece, blocks: int) -> list[tuple[Blocks, slice, slice]]:
    """Cut a piece into runs of `blocks` blocks, with their slices of the vector and payload."""
    first_byte = piece.bytes.start - piece.blocks.bytes.start
    cut = []
    for first in range(0, len(piece.blocks), blocks):
        part = piece.blocks.part(first, min(first + blocks, len(piece.blocks)))
        place = slice(part.bytes.start + first_byte, part.bytes.stop + first_byte)
        cut.append((part, part.values, place))
    return cut
