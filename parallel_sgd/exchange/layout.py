"""The layout of an exchange: how the vector is cut, and which ranks send to which ranks.

    vector   |<-- parameters "W" ------------------------->|<-- "b" ->|<-- "V" -->|
    buckets  |<-- bucket 1, ready last ------------------------------>|<-- 0 ---->|
    stripes  |<-- owner 0 ------>|<-- owner 1 ------>|<-- owner 2 --->|  0 |  1 | 2
    pieces   |tag 3|tag 4|tag 5|6|tag 7|tag 8|tag 9|10| ...           | 0  | 1  | 2
    blocks   |..|..|..|..|..|..|..|..|..|..|..|..|..|. ...   of quantization: always whole

Each owner adds up its stripe of every bucket, and each piece is a message of its own. The cuts
never change a sum, because the blocks of quantization are the same for every layout.

    hosts    |   host 0   |   host 1   |          a piece of owner 1:
    ranks    |  0  *1  2  |  3  *4  5  |             0, 2 -> 1;   3, 5 -> 4     within hosts
                                                     4 -> 1                     between hosts

On each host, the local leader of the piece (*) adds up the values of the host's ranks and sends the
sum to the owner. The owner adds the sums of the hosts and sends the result back to the local
leaders, which pass the result on within their hosts. If every rank is a host of its own, each rank
leads only its own values, and all ranks send to the owner directly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..communication.messages import piece_values
from ..errors import UserError
from ..kernels import Blocks
from ..kernels.blocks import IndexArray
from ..parameters import Parameters


@dataclass(frozen=True)
class Bucket:
    """Consecutive parameters, exchanged together once all of their gradients are complete.

    Attributes:
        names: of the parameters.
        values: their slice of the vector.
        part: the number of its part of the vector; parts are exchanged at different times.
    """

    names: tuple[str, ...]
    values: slice
    part: int = 0


@dataclass(frozen=True, eq=False)
class Piece:
    """The unit of messages: some blocks of one owner.

    Attributes:
        tag: its number among all pieces, the same on all ranks.
        owner: the rank that sums the piece.
        blocks: of quantization.
        values: its slice of the vector.
        bytes: its slice of the bucket's payload.
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
    """A bucket, divided among its owners.

    Attributes:
        number: of the bucket.
        values: its slice of the vector.
        stripes: the blocks of each owner.
        pieces: of all owners, in the order of the vector.
    """

    number: int
    values: slice
    stripes: list[Blocks]
    pieces: list[Piece]


@dataclass(frozen=True)
class Topology:
    """The grouping of ranks by hosts: the ranks of a host add up locally before sending.

    Attributes:
        hosts: the ranks of each host, ascending; hosts in the order of their first rank. If NCCL
            sums within hosts, each entry is a single rank, which exchanges its share of the pieces
            for the host.
        host_of: the host number of each rank.
    """

    hosts: tuple[tuple[int, ...], ...]
    host_of: tuple[int, ...]

    @classmethod
    def over(cls, hosts: Sequence[Hashable]) -> Topology:
        """Create a topology from the host of every rank; ranks with equal hosts are grouped."""
        numbers: dict[Hashable, int] = {}
        host_of = tuple(numbers.setdefault(host, len(numbers)) for host in hosts)
        members = tuple(
            tuple(rank for rank, its_host in enumerate(host_of) if its_host == host)
            for host in range(len(numbers))
        )
        return cls(members, host_of)

    @classmethod
    def flat(cls, size: int) -> Topology:
        """Create a topology in which every rank is a host of its own."""
        return cls.over(range(size))

    @property
    def hierarchical(self) -> bool:
        """True if any host has several ranks."""
        return len(self.hosts) < len(self.host_of)

    def has(self, rank: int) -> bool:
        """Return True if `hosts` lists the rank."""
        return rank in self.hosts[self.host_of[rank]]

    def local_leader(self, host: int, owner: int) -> int:
        """Return the rank that adds up the pieces of `owner` on `host`.

        On the owner's host this is the owner itself. On any other host this is the rank at the
        owner's place, so that the ranks of a host share the work.
        """
        place = self.hosts[self.host_of[owner]].index(owner)
        return self.hosts[host][place % len(self.hosts[host])]


def topology_for(hosts: Sequence[str], hierarchical: bool | str) -> Topology:
    """Return the topology for the option `hierarchical`.

    Args:
        hosts: the host name of every rank.
        hierarchical: "auto" groups by hosts if there are several hosts and any has several ranks.
            On a single machine there are no messages between hosts to save.

    Local.
    """
    if hierarchical == "auto":
        hierarchical = 1 < len(set(hosts)) < len(hosts)
    return Topology.over(hosts) if hierarchical else Topology.flat(len(hosts))


def cut_buckets(
    parameters: Parameters,
    block_size: int,
    bucket_values: int,
    starts: IndexArray | None = None,
    parts: int = 1,
) -> list[Bucket]:
    """Cut the vector into buckets between parameters, beginning with the last parameters.

    A backward pass computes gradients in this order. Parameters are never cut. Buckets begin and
    end at block borders, so small neighbours in a shared block stay together.

    Args:
        parameters: the layout of the vector.
        block_size: values in a full block.
        bucket_values: the least number of values in a bucket; only the last bucket may have fewer.
        starts: int64, the first value of each block. Default: blocks cut by size alone, regardless
            of parameter names.
        parts: number of parts of consecutive buckets, of about equal size, in the order of the
            vector.
    Raises:
        UserError: more parts than parameters at block borders.

    Local.
    """
    names = parameters.names
    sizes = [parameters[name].size for name in names]
    begins = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    starts = parameters.block_starts(block_size) if starts is None else starts
    possible = np.isin(begins, starts)
    borders = _cut_parts(begins, np.flatnonzero(possible[:-1]).tolist(), parts)
    buckets: list[Bucket] = []
    last = len(names)
    for first in range(len(names) - 1, -1, -1):
        size = int(begins[last] - begins[first])
        if first in borders or (possible[first] and size >= bucket_values):
            part = bisect_right(borders, first) - 1
            values = slice(int(begins[first]), int(begins[last]))
            buckets.append(Bucket(names[first:last], values, part))
            last = first
    return buckets


def _cut_parts(begins: IndexArray, possible: Sequence[int], parts: int) -> list[int]:
    """Return the first parameter of each part.

    Args:
        begins: the first value of each parameter, then the end of the last.
        possible: the parameters at which a part may begin, ascending, from 0.
        parts: their number.
    """
    if parts > len(possible):
        raise UserError(
            f"fragments={parts} must be at most {len(possible)}, the number of parameters that can "
            "be exchanged apart (small neighbours share a block of values)"
        )
    chosen = [0]
    for number in range(1, parts):
        after, left = possible.index(chosen[-1]) + 1, parts - number
        candidates = possible[after : len(possible) - left + 1]
        ideal = begins[-1] * number / parts
        chosen.append(min(candidates, key=lambda first: abs(begins[first] - ideal)))
    return chosen


def cut_bucket(
    number: int, bucket: Bucket, blocks: Blocks, ranks: int, first_tag: int
) -> CutBucket:
    """Divide a bucket among its owners, along the blocks of the whole vector. Local."""
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
    """Divide blocks into one stripe per rank, of about equal size.

    The values are divided into `size` equal parts; rank k owns the blocks that begin in part k.
    Local.
    """
    begin, end = blocks.values.start, blocks.values.stop
    edges = begin + np.arange(1, size) * (end - begin) / size
    inner = np.searchsorted(blocks.starts, edges).tolist()
    return [blocks.part(a, b) for a, b in pairwise([0, *inner, len(blocks)])]


def cut_pieces(stripes: list[Blocks], first_tag: int, values: int) -> list[Piece]:
    """Cut all stripes into pieces, in the order of the vector.

    Args:
        stripes: the blocks of each owner.
        first_tag: of the first piece.
        values: in a piece. A block with more values is a piece by itself.

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
