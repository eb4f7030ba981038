"""What an exchange does to one bucket, without communication: the stages between messages.

On its way a piece is

    gathered      the ranks of a host add up what they have, in rank order
    contributed   what a host has is encoded, for the piece's owner
    totalled      the owner decodes and adds what the hosts have, in their order, and encodes that
    taken         everybody decodes the sum

`CompressedStages` does that with a codec, each message with a residual of its own, so that over any
number of steps

    sum of all results + sum of residuals.total + sum of residuals.own == sum of all inputs

to rounding (docs/algorithms.md; Seide et al. 2014, §3.3). The second residual is what a plain
all-reduce of quantized gradients would lose. `PlainStages` sends the values as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..compression import Codec
from ..kernels import Blocks, array_module, empty_like
from .pieces import Bucket, Piece, cut_pieces, cut_stripes, piece_values
from .residuals import Residuals
from .routes import Routes

Array = Any  #: a NumPy or CuPy array

IN_CACHE = 1 << 16  #: values that are summed at a time, so that the sum stays in cache


@dataclass(frozen=True, eq=False)
class Part:
    """What a rank has to know of a bucket.

    Attributes:
        number: of the bucket, among all.
        bucket: which part of the vector.
        blocks: of quantization in it, with their places in the payload.
        like: an array of the vector's kind.
        rank: whose buffers are to be made.
        routes: who gathers for whom.
        first_tag: of the pieces.
    """

    number: int
    bucket: Bucket
    blocks: Blocks
    like: Array
    rank: int
    routes: Routes
    first_tag: int


class Stages(ABC):
    """
    Args:
        part: the bucket.
        value_bytes: of a value on the wire.

    Attributes:
        name: of the bucket in `Residuals.total`.
        pieces: of all owners, in the order of the vector.
        own: the values of this rank's stripe in the vector.
        counts: how much of `wire` is each rank's.
        received: of as much as this rank owns, from each host.

    Local.
    """

    counts: list[int]
    received: Array

    def __init__(self, part: Part, value_bytes: float) -> None:
        rank, routes, like = part.rank, part.routes, part.like
        self.name, self.bucket, self.rank, self.routes = str(part.number), part.bucket, rank, routes
        self.stripes = cut_stripes(part.blocks, len(routes.host_of))
        self.pieces = cut_pieces(self.stripes, part.first_tag, piece_values(value_bytes))
        self.own = self.stripes[rank].values
        local = routes.hosts[routes.host_of[rank]]
        self._others = [each for each in local if each != rank]
        gathered = [piece for piece in self.pieces if self.gathers(piece)]
        self._begin_of = {}
        room = 0
        for piece in gathered:
            self._begin_of[piece.tag] = room
            room += piece.size
        self._gathered = empty_like(like, room * len(self._others)).reshape(len(self._others), room)
        self._step = IN_CACHE if array_module(like) is np else 1 << 62

    def gathers(self, piece: Piece) -> bool:
        """Whether this rank adds up a piece of its host."""
        return self.routes.gatherer(self.routes.host_of[self.rank], piece.owner) == self.rank

    def gather_room(self, piece: Piece, peer: int) -> Array:
        """Where the values of another rank of this host are received."""
        begin = self._begin_of[piece.tag]
        return self._gathered[self._others.index(peer), begin : begin + piece.size]

    def gather(self, piece: Piece, vector: Array) -> None:
        """Add up what the ranks of this host have, in their order, into `vector`."""
        local = self.routes.hosts[self.routes.host_of[self.rank]]
        own = vector[piece.values]
        add_in_order(
            [own if each == self.rank else self.gather_room(piece, each) for each in local],
            local.index(self.rank),
            self._step,
        )

    @abstractmethod
    def wire(self, vector: Array) -> Array:
        """What holds the messages of all pieces, one stripe behind the other; see `counts`."""

    @abstractmethod
    def contribute(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        """This host's values of a piece, as they are sent to its owner."""

    @abstractmethod
    def contribution_room(self, piece: Piece, host: int) -> Array:
        """At the owner: where the contribution of another host is received."""

    @abstractmethod
    def total(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        """At the owner, when all contributions are here: the sum, as it is sent to all."""

    @abstractmethod
    def result_room(self, piece: Piece, vector: Array) -> Array:
        """Where the sum is received; in use until this rank's own message has been sent."""

    @abstractmethod
    def take(self, piece: Piece, vector: Array) -> None:
        """Put the sum that has been received into `vector`."""


class CompressedStages(Stages):
    """With a codec, and error feedback.

    Memory for n values of b bits on K hosts: buffers of about 2n·b/8 bytes.
    """

    def __init__(self, part: Part, codec: Codec) -> None:
        values, encoded = part.blocks.values, part.blocks.bytes
        size = values.stop - values.start
        each = (encoded.stop - encoded.start) / size if size else 1.0
        super().__init__(part, each)
        rank, routes, like = part.rank, part.routes, part.like
        self.codec = codec
        self.counts = [s.bytes.stop - s.bytes.start for s in self.stripes]
        self.payload = empty_like(like, sum(self.counts), np.uint8)
        self.received = empty_like(like, len(routes.hosts) * self.counts[rank], np.uint8)
        self._rows = self.received.reshape(len(routes.hosts), -1)
        self.own_bytes = slice(sum(self.counts[:rank]), sum(self.counts[: rank + 1]))
        blocks_at_a_time = max(1, IN_CACHE // getattr(codec, "block_size", 1024))
        self._parts = {
            piece.tag: _parts(piece, blocks_at_a_time if self._step == IN_CACHE else 1 << 62)
            for piece in self.pieces
            if piece.owner == rank
        }

    def wire(self, vector: Array) -> Array:
        return self.payload

    def contribute(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        assert residuals is not None
        payload = self.payload[piece.bytes]
        self.codec.encode(piece.blocks, vector[piece.values], residuals.own[piece.values], payload)
        return payload

    def contribution_room(self, piece: Piece, host: int) -> Array:
        begin = piece.bytes.start - self.own_bytes.start
        return self._rows[host, begin : begin + piece.bytes.stop - piece.bytes.start]

    def total(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        assert residuals is not None
        codec, residual = self.codec, residuals.total[self.name]
        here = self.routes.host_of[self.rank]
        for part, values, place in self._parts[piece.tag]:
            total, encoded = vector[values], self.payload[place]
            within = slice(place.start - self.own_bytes.start, place.stop - self.own_bytes.start)
            for host in range(len(self.routes.hosts)):
                sent = encoded if host == here else self._rows[host, within]
                codec.decode(part, sent, total, add=host > 0)
            own = slice(values.start - self.own.start, values.stop - self.own.start)
            codec.encode(part, total, residual[own], encoded)
        return self.payload[piece.bytes]

    def result_room(self, piece: Piece, vector: Array) -> Array:
        return self.payload[piece.bytes]

    def take(self, piece: Piece, vector: Array) -> None:
        self.codec.decode(piece.blocks, self.payload[piece.bytes], vector[piece.values], add=False)


class PlainStages(Stages):
    """The values as they are. Nothing is lost.

    Memory: a buffer of about the vector's size.
    """

    def __init__(self, part: Part) -> None:
        super().__init__(part, part.like.itemsize)
        rank, routes, like = part.rank, part.routes, part.like
        self.counts = [s.values.stop - s.values.start for s in self.stripes]
        self.received = empty_like(like, len(routes.hosts) * self.counts[rank])
        self._rows = self.received.reshape(len(routes.hosts), -1)

    def wire(self, vector: Array) -> Array:
        return vector[self.bucket.values]

    def contribute(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        return vector[piece.values]

    def contribution_room(self, piece: Piece, host: int) -> Array:
        begin = piece.values.start - self.own.start
        return self._rows[host, begin : begin + piece.size]

    def total(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        total, here = vector[piece.values], self.routes.host_of[self.rank]
        add_in_order(
            [
                total if host == here else self.contribution_room(piece, host)
                for host in range(len(self.routes.hosts))
            ],
            here,
            self._step,
        )
        return total

    def result_room(self, piece: Piece, vector: Array) -> Array:
        return vector[piece.values]

    def take(self, piece: Piece, vector: Array) -> None:
        pass  # it has been received in its place


def add_in_order(arrays: Sequence[Array], place: int, step: int) -> None:
    """``arrays[place] = arrays[0] + arrays[1] + …``, from left to right. Local.

    Args:
        arrays: [n] each; those before `place` are changed.
        step: values at a time, so that the sum stays in cache.
    """
    for first in range(0, arrays[place].size, step):
        terms = [array[first : first + step] for array in arrays]
        for term in terms[1:place]:
            terms[0] += term
        if place:
            array_module(terms[0]).add(terms[0], terms[place], out=terms[place])
        for term in terms[place + 1 :]:
            terms[place] += term


def _parts(piece: Piece, blocks: int) -> list[tuple[Blocks, slice, slice]]:
    """So many blocks of a piece at a time, with their places in the vector and in the payload."""
    found = []
    first_byte = piece.bytes.start - piece.blocks.bytes.start
    for first in range(0, len(piece.blocks), blocks):
        part = piece.blocks.part(first, min(first + blocks, len(piece.blocks)))
        place = slice(part.bytes.start + first_byte, part.bytes.stop + first_byte)
        found.append((part, part.values, place))
    return found
