"""How the vector is cut: into buckets, stripes of owners, and pieces that travel by themselves.

Nothing of it changes a sum: blocks of quantization stay whole, and are the same however the vector
is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..kernels import Blocks
from ..parameters import Parameters

PIECE = 1 << 18  #: values, at most, of a piece
PIECE_BYTES = 1 << 18  #: at most, as they are sent


@dataclass(frozen=True)
class Bucket:
    """Consecutive parameters whose gradient is exchanged when all of them have theirs.

    Attributes:
        names: of the parameters.
        values: where they lie in the vector.
    """

    names: tuple[str, ...]
    values: slice


@dataclass(frozen=True, eq=False)
class Piece:
    """What travels by itself: some blocks of one owner.

    Attributes:
        tag: its number among all pieces, the same on all ranks.
        owner: the rank that sums it.
        blocks: of quantization.
        values: in the vector.
        bytes: in the payload of its bucket.
    """

    tag: int
    owner: int
    blocks: Blocks
    values: slice
    bytes: slice

    @property
    def size(self) -> int:
        size: int = self.values.stop - self.values.start
        return size


def cut_buckets(parameters: Parameters, block_size: int, bucket_values: int) -> list[Bucket]:
    """Cut at parameters, the last ones first: so their gradient comes out of a backward pass.

    Args:
        bucket_values: how many a bucket has at least, but for the last one. Parameters are not cut.

    Buckets begin and end with a block, so small neighbours that share one stay together. Local.
    """
    names = parameters.names
    sizes = [parameters[name].size for name in names]
    begins = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    possible = np.isin(begins, parameters.block_starts(block_size))
    buckets: list[Bucket] = []
    last = len(names)
    for first in range(len(names) - 1, -1, -1):
        size = int(begins[last] - begins[first])
        if first == 0 or (possible[first] and size >= bucket_values):
            buckets.append(Bucket(names[first:last], slice(int(begins[first]), int(begins[last]))))
            last = first
    return buckets


def blocks_of(blocks: Blocks, bucket: Bucket) -> Blocks:
    """Those of a bucket."""
    borders = [bucket.values.start, bucket.values.stop]
    first, last = np.searchsorted(blocks.starts, borders)
    assert blocks.starts[[first, last]].tolist() == borders, "a bucket begins and ends with a block"
    return blocks.part(int(first), int(last))


def cut_stripes(blocks: Blocks, size: int) -> list[Blocks]:
    """One for each rank: the blocks that begin in its share of equal parts of these."""
    begin, end = blocks.values.start, blocks.values.stop
    edges = begin + np.arange(1, size) * (end - begin) / size
    inner = np.searchsorted(blocks.starts, edges).tolist()
    return [blocks.part(a, b) for a, b in pairwise([0, *inner, len(blocks)])]


def piece_values(value_bytes: float) -> int:
    """How many values of so many bytes on the wire make a piece.

    More values make fewer messages; more bytes would make some MPIs agree on each with its receiver
    before they send it (see `communication.launched.EAGER_BYTES`).
    """
    return max(1, int(min(PIECE, PIECE_BYTES / value_bytes)))


def cut_pieces(stripes: list[Blocks], first_tag: int, values: int) -> list[Piece]:
    """The pieces of all stripes, in the order of the vector.

    Args:
        values: of a piece, or of its only block.

    Local.
    """
    pieces: list[Piece] = []
    for owner, stripe in enumerate(stripes):
        begin, end = stripe.values.start, stripe.values.stop
        edges = np.arange(begin + values, end, values)
        inner = np.unique(np.searchsorted(stripe.starts, edges)).tolist()
        for a, b in pairwise([0, *inner, len(stripe)]):
            part = stripe.part(a, b)
            if part.values.stop > part.values.start:
                tag = first_tag + len(pieces)
                within = slice(
                    part.bytes.start - stripes[0].bytes.start,
                    part.bytes.stop - stripes[0].bytes.start,
                )
                pieces.append(Piece(tag, owner, part, part.values, within))
    return pieces
