"""Who owns what: how the vector is cut, and which ranks send to whom.

    vector   |<-- parameters "W" ------------------------->|<-- "b" ->|<-- "V" -->|
    buckets  |<-- bucket 1, ready last ------------------------------>|<-- 0 ---->|
    stripes  |<-- owner 0 ------>|<-- owner 1 ------>|<-- owner 2 --->|  0 |  1 | 2
    pieces   |tag 3|tag 4|tag 5|6|tag 7|tag 8|tag 9|10| ...           | 0  | 1  | 2
    blocks   |..|..|..|..|..|..|..|..|..|..|..|..|..|. ...   of quantization: always whole

Each owner adds up its stripe of every bucket, and pieces travel by themselves. Nothing of it
changes a sum: blocks are the same however the vector is cut.

    hosts    |   host 0   |   host 1   |          a piece of owner 1:
    ranks    |  0  *1  2  |  3  *4  5  |             0, 2 -> 1;   3, 5 -> 4     within hosts
                                                     4 -> 1                     between hosts

On each host one rank, the local leader of the piece (*), adds up what the ranks of the host have
and sends that to the owner. The owner adds what the hosts have and sends the result back, to be
passed on within each host. With every rank on a host of its own a rank leads its own values only,
and all ranks talk to the owner.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..communication.messages import piece_values
from ..kernels import Blocks
from ..kernels.blocks import IndexArray
from ..parameters import Parameters


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


@dataclass(frozen=True, eq=False)
class CutBucket:
    """A bucket among its owners.

    Attributes:
        number: of the bucket.
        values: where it lies in the vector.
        stripes: the blocks of each owner.
        pieces: of all owners, in the order of the vector.
    """

    number: int
    values: slice
    stripes: list[Blocks]
    pieces: list[Piece]


@dataclass(frozen=True)
class Topology:
    """
    Attributes:
        hosts: the ranks of each host, ascending; hosts by their first rank. (Where NCCL sums
            within hosts, the one that exchanges a part of the pieces for its host.)
        host_of: the number of each rank's host.
    """

    hosts: tuple[tuple[int, ...], ...]
    host_of: tuple[int, ...]

    @classmethod
    def over(cls, hosts: Sequence[Hashable]) -> Topology:
        """From the host of every rank; equal for ranks of one host."""
        numbers: dict[Hashable, int] = {}
        host_of = tuple(numbers.setdefault(host, len(numbers)) for host in hosts)
        members = tuple(
            tuple(rank for rank, its_host in enumerate(host_of) if its_host == host)
            for host in range(len(numbers))
        )
        return cls(members, host_of)

    @classmethod
    def flat(cls, size: int) -> Topology:
        """Every rank sends to the owner itself."""
        return cls.over(range(size))

    @property
    def hierarchical(self) -> bool:
        """Whether any host has several ranks."""
        return len(self.hosts) < len(self.host_of)

    def has(self, rank: int) -> bool:
        """Whether a rank is one of those on its host."""
        return rank in self.hosts[self.host_of[rank]]

    def local_leader(self, host: int, owner: int) -> int:
        """The rank that adds up a piece of this owner on a host: the owner itself, or on another
        host the one at its place, so that the ranks of a host share the work."""
        place = self.hosts[self.host_of[owner]].index(owner)
        return self.hosts[host][place % len(self.hosts[host])]


def topology_for(hosts: Sequence[str], hierarchical: bool | str) -> Topology:
    """
    Args:
        hosts: the machine of every rank.
        hierarchical: "auto" is yes where there are several hosts, and several ranks on one of
            them: on a single machine there is no message between hosts to save.
    """
    if hierarchical == "auto":
        hierarchical = 1 < len(set(hosts)) < len(hosts)
    return Topology.over(hosts) if hierarchical else Topology.flat(len(hosts))


def cut_buckets(
    parameters: Parameters,
    block_size: int,
    bucket_values: int,
    starts: IndexArray | None = None,
) -> list[Bucket]:
    """Cut at parameters, the last ones first: so their gradient comes out of a backward pass.

    Args:
        bucket_values: how many a bucket has at least, but for the last one. Parameters are not cut.
        starts: of blocks; if not given, of those that are cut without regard to names.

    Buckets begin and end with a block, so small neighbours that share one stay together. Local.
    """
    names = parameters.names
    sizes = [parameters[name].size for name in names]
    begins = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    starts = parameters.block_starts(block_size) if starts is None else starts
    possible = np.isin(begins, starts)
    buckets: list[Bucket] = []
    last = len(names)
    for first in range(len(names) - 1, -1, -1):
        size = int(begins[last] - begins[first])
        if first == 0 or (possible[first] and size >= bucket_values):
            buckets.append(Bucket(names[first:last], slice(int(begins[first]), int(begins[last]))))
            last = first
    return buckets


def cut_bucket(
    number: int, bucket: Bucket, blocks: Blocks, ranks: int, first_tag: int
) -> CutBucket:
    """Divide a bucket among its owners, by the blocks of the whole vector. Local."""
    borders = [bucket.values.start, bucket.values.stop]
    first, last = np.searchsorted(blocks.starts, borders)
    assert blocks.starts[[first, last]].tolist() == borders, "a bucket begins and ends with a block"
    blocks = blocks.part(int(first), int(last))
    values, encoded = blocks.values, blocks.bytes
    size = values.stop - values.start
    of_a_piece = piece_values((encoded.stop - encoded.start) / size if size else 1.0)
    stripes = cut_stripes(blocks, ranks)
    return CutBucket(number, values, stripes, cut_pieces(stripes, first_tag, of_a_piece))


def cut_stripes(blocks: Blocks, size: int) -> list[Blocks]:
    """One for each rank: the blocks that begin in its share of equal parts of these."""
    begin, end = blocks.values.start, blocks.values.stop
    edges = begin + np.arange(1, size) * (end - begin) / size
    inner = np.searchsorted(blocks.starts, edges).tolist()
    return [blocks.part(a, b) for a, b in pairwise([0, *inner, len(blocks)])]


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
