"""The arithmetic of an exchange: what is done to a piece between its messages. No communication.

    values         of rank k                      g_k
    local_sum      its host h, in rank order      s_h = Σ_(k in h) g_k
    encode         for the owner                  m_h = Encode(s_h + worker_error)
    reduce         the owner, in host order       g   = Σ_h Decode(m_h)
                   for everybody                  m   = Encode(g + owner_error)
    decode         everybody                      g'  = Decode(m)

That is a reduce-scatter and an all-gather whose messages are compressed. What a message loses stays
with its sender, so that over any number of steps

    sum of all g' + sum of owner_error + sum of worker_error == sum of all g_k

to rounding (docs/algorithms.md; Seide et al. 2014, §3.3). The owners' error is what a plain
all-reduce of quantized gradients would lose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..communication.messages import piece_values
from ..compression import Codec
from ..kernels import Blocks, array_module, empty_like
from .layout import Bucket, Piece, Topology, cut_pieces, cut_stripes
from .residuals import Residuals

Array = Any  #: a NumPy or CuPy array

IN_CACHE = 1 << 16  #: values that are summed at a time, so that the sum stays in cache
ALL_AT_ONCE = 1 << 62  #: a GPU's


@dataclass(frozen=True, eq=False)
class Part:
    """What a rank has to know of a bucket.

    Attributes:
        number: of the bucket, among all.
        bucket: which part of the vector.
        blocks: of quantization in it, with their places in the payload.
        like: an array of the vector's kind.
        rank: whose buffers are to be made.
        topology: who sends to whom.
        first_tag: of the pieces.
    """

    number: int
    bucket: Bucket
    blocks: Blocks
    like: Array
    rank: int
    topology: Topology
    first_tag: int


class Reduction(ABC):
    """
    Args:
        part: the bucket.
        value_bytes: of a value on the wire.

    Attributes:
        name: of the bucket in `Residuals.owner_error`.
        pieces: of all owners, in the order of the vector.
        own: the values of this rank's stripe in the vector.
        counts: how much of `wire` is each rank's.
        received: of as much as this rank owns, from each host.

    Local.
    """

    counts: list[int]
    received: Array

    def __init__(self, part: Part, value_bytes: float) -> None:
        rank, topology, like = part.rank, part.topology, part.like
        self.name, self.bucket = str(part.number), part.bucket
        self.rank, self.topology = rank, topology
        self.host = topology.host_of[rank]
        self.hosts = range(len(topology.hosts))
        self.stripes = cut_stripes(part.blocks, len(topology.host_of))
        self.pieces = cut_pieces(self.stripes, part.first_tag, piece_values(value_bytes))
        self.own = self.stripes[rank].values
        self.local_ranks = topology.hosts[self.host]
        self.local_peers = [peer for peer in self.local_ranks if peer != rank]
        self._values_begin, room = {}, 0
        for piece in self.pieces:
            if self.leads(piece):
                self._values_begin[piece.tag] = room
                room += piece.size
        peers = len(self.local_peers)
        self._values = empty_like(like, room * peers).reshape(peers, room)
        self._at_a_time = IN_CACHE if array_module(like) is np else ALL_AT_ONCE

    def leads(self, piece: Piece) -> bool:
        """Whether this rank adds up a piece of its host."""
        return self.topology.local_leader(self.host, piece.owner) == self.rank

    def values_buffer(self, piece: Piece, peer: int) -> Array:
        """At the local leader: where the values of another rank of its host are received."""
        begin = self._values_begin[piece.tag]
        return self._values[self.local_peers.index(peer), begin : begin + piece.size]

    def local_sum(self, piece: Piece, vector: Array) -> None:
        """At the local leader: add what the ranks of this host have, in rank order, in `vector`."""
        own = vector[piece.values]
        terms = [
            own if rank == self.rank else self.values_buffer(piece, rank)
            for rank in self.local_ranks
        ]
        add_in_order(terms, self.local_ranks.index(self.rank), self._at_a_time)

    @abstractmethod
    def wire(self, vector: Array) -> Array:
        """What holds the messages of all pieces, one stripe behind the other; see `counts`."""

    @abstractmethod
    def encode(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        """At the local leader: this host's sum, as it is sent to the owner."""

    @abstractmethod
    def encoded_buffer(self, piece: Piece, host: int) -> Array:
        """At the owner: where the message of another host is received."""

    @abstractmethod
    def reduce(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        """At the owner, when the messages of all hosts are here: the sum, as it is sent to all."""

    @abstractmethod
    def reduced_buffer(self, piece: Piece, vector: Array) -> Array:
        """Where the sum is received; in use until this rank's own message has been sent."""

    @abstractmethod
    def decode(self, piece: Piece, vector: Array) -> None:
        """Put the sum that has been received into `vector`."""


class CompressedReduction(Reduction):
    """With a codec, and error feedback.

    Memory for n values of b bits on K hosts: buffers of about 2n·b/8 bytes.
    """

    def __init__(self, part: Part, codec: Codec) -> None:
        values, encoded = part.blocks.values, part.blocks.bytes
        size = values.stop - values.start
        super().__init__(part, (encoded.stop - encoded.start) / size if size else 1.0)
        rank, like = part.rank, part.like
        self.codec = codec
        self.counts = [stripe.bytes.stop - stripe.bytes.start for stripe in self.stripes]
        self.payload = empty_like(like, sum(self.counts), np.uint8)
        self.received = empty_like(like, len(self.hosts) * self.counts[rank], np.uint8)
        self._rows = self.received.reshape(len(self.hosts), -1)
        self._first_byte = sum(self.counts[:rank])
        at_a_time = ALL_AT_ONCE
        if self._at_a_time == IN_CACHE:
            at_a_time = max(1, IN_CACHE // codec.block_size)
        self._parts = {
            piece.tag: _parts(piece, at_a_time) for piece in self.pieces if piece.owner == rank
        }

    def wire(self, vector: Array) -> Array:
        return self.payload

    def encode(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        assert residuals is not None
        message = self.payload[piece.bytes]
        values, error = vector[piece.values], residuals.worker_error[piece.values]
        # message <- Encode(values + error)
        # error   <- values + error - Decode(message)
        self.codec.encode(piece.blocks, values, error, message)
        return message

    def encoded_buffer(self, piece: Piece, host: int) -> Array:
        begin, end = piece.bytes.start - self._first_byte, piece.bytes.stop - self._first_byte
        return self._rows[host, begin:end]

    def reduce(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        assert residuals is not None
        codec, owner_error = self.codec, residuals.owner_error[self.name]
        for blocks, values, place in self._parts[piece.tag]:
            total, message = vector[values], self.payload[place]
            within = slice(place.start - self._first_byte, place.stop - self._first_byte)
            error = owner_error[values.start - self.own.start : values.stop - self.own.start]
            # total   <- sum of Decode(the message of each host), this one's own like the others
            # message <- Encode(total + error)
            # error   <- total + error - Decode(message)
            for host in self.hosts:
                encoded = message if host == self.host else self._rows[host, within]
                codec.decode(blocks, encoded, total, add=host > 0)
            codec.encode(blocks, total, error, message)
        return self.payload[piece.bytes]

    def reduced_buffer(self, piece: Piece, vector: Array) -> Array:
        return self.payload[piece.bytes]

    def decode(self, piece: Piece, vector: Array) -> None:
        # values <- Decode(message)
        self.codec.decode(piece.blocks, self.payload[piece.bytes], vector[piece.values], add=False)


class PlainReduction(Reduction):
    """The values as they are. Nothing is lost.

    Memory: a buffer of about the vector's size.
    """

    def __init__(self, part: Part) -> None:
        super().__init__(part, part.like.itemsize)
        self.counts = [stripe.values.stop - stripe.values.start for stripe in self.stripes]
        self.received = empty_like(part.like, len(self.hosts) * self.counts[part.rank])
        self._rows = self.received.reshape(len(self.hosts), -1)

    def wire(self, vector: Array) -> Array:
        return vector[self.bucket.values]

    def encode(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        return vector[piece.values]

    def encoded_buffer(self, piece: Piece, host: int) -> Array:
        begin = piece.values.start - self.own.start
        return self._rows[host, begin : begin + piece.size]

    def reduce(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        total = vector[piece.values]
        terms = [
            total if host == self.host else self.encoded_buffer(piece, host) for host in self.hosts
        ]
        add_in_order(terms, self.host, self._at_a_time)
        return total

    def reduced_buffer(self, piece: Piece, vector: Array) -> Array:
        return vector[piece.values]

    def decode(self, piece: Piece, vector: Array) -> None:
        pass  # it has been received in its place


def add_in_order(arrays: Sequence[Array], place: int, at_a_time: int) -> None:
    """``arrays[place] = arrays[0] + arrays[1] + …``, from left to right. Local.

    Args:
        arrays: [n] each; those before `place` are changed.
        at_a_time: values, so that the sum stays in cache.
    """
    for first in range(0, arrays[place].size, at_a_time):
        terms = [array[first : first + at_a_time] for array in arrays]
        for term in terms[1:place]:
            terms[0] += term
        if place:
            array_module(terms[0]).add(terms[0], terms[place], out=terms[place])
        for term in terms[place + 1 :]:
            terms[place] += term


def _parts(piece: Piece, blocks: int) -> list[tuple[Blocks, slice, slice]]:
    """So many blocks of a piece at a time, with their places in the vector and in the payload."""
    parts = []
    first_byte = piece.bytes.start - piece.blocks.bytes.start
    for first in range(0, len(piece.blocks), blocks):
        part = piece.blocks.part(first, min(first + blocks, len(piece.blocks)))
        place = slice(part.bytes.start + first_byte, part.bytes.stop + first_byte)
        parts.append((part, part.values, place))
    return parts
