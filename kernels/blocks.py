"""The blocks of a flat vector, and the wire format of quantized blocks.

All bodies of the kernels write this format byte for byte (all numbers little-endian):

========  =====================================================================================
bits      one block of L values
========  =====================================================================================
1         ``float32 low, float32 high``, then ceil(L/32) groups of 4 bytes: value i is bit i
4         ``float32 step``, then ceil(L/32) groups of 16 bytes: byte j of a group holds the codes
          of its values j and j+16, the first in the lower bits
8         ``float32 step``, then ceil(L/32) groups of 32 bytes: byte j holds value j
raw       L float32
========  =====================================================================================

Codes of 4 and 8 bits are two's complement; unused bits of the last group are zero.

A block is sent raw if encoding would not make it smaller, so nothing ever grows on the wire. All
sizes are multiples of 4 bytes, so the floats inside a payload are aligned. The 16-bit formats have
no levels and need no blocks: a value is its two bytes. Top-k and the entropy code have formats of
their own: see `top_k_reference` and `entropy_reference`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

GROUP = 32  #: values packed together, and the lanes of every sum: see `reference.lane_sum`

IndexArray = npt.NDArray[np.int64]

_LEVEL_BYTES = {1: 8, 4: 4, 8: 4}


@dataclass(frozen=True, eq=False)
class Blocks:
    """Consecutive blocks of a flat vector, with their positions in a payload.

    Args:
        starts: int64 [m + 1], the index of each block's first value, then the end of the last.
        offsets: int64 [m + 1], the byte of each block's payload, then the end of the last.

    Kernels take arrays with just these blocks: index 0 is the value ``starts[0]``, byte 0 the byte
    ``offsets[0]``. Some of the blocks therefore go with the same part of the arrays.
    """

    starts: IndexArray
    offsets: IndexArray

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def values(self) -> slice:
        """The slice of these blocks in the whole vector."""
        return slice(int(self.starts[0]), int(self.starts[-1]))

    @property
    def bytes(self) -> slice:
        """The slice of these blocks in the whole payload."""
        return slice(int(self.offsets[0]), int(self.offsets[-1]))

    def part(self, first: int, last: int) -> Blocks:
        """Return blocks ``first`` to ``last - 1``, without a copy."""
        return Blocks(self.starts[first : last + 1], self.offsets[first : last + 1])

    def views(self, *arrays: Any) -> Iterator[tuple[Any, ...]]:
        """Yield the views of every array for each block; a uint8 array is a payload."""
        starts, offsets = self.starts - self.starts[0], self.offsets - self.offsets[0]
        for i in range(len(self)):
            yield tuple(
                a[offsets[i] : offsets[i + 1]]
                if a.dtype == np.uint8
                else a[starts[i] : starts[i + 1]]
                for a in arrays
            )


def cut(sizes: Sequence[int], block_size: int) -> IndexArray:
    """Cut consecutive parameters into blocks.

    A parameter of at least ``block_size`` values begins and ends its own blocks. Smaller neighbours
    share a block: their scales seldom differ much, and levels for each would be expensive.

    Args:
        sizes: values in each parameter, in the order of the flat vector.
        block_size: values in a full block.
    Returns:
        int64 [m + 1]: the first value of each block, then the end of the last.
    """
    runs: list[int] = []
    after_small = False
    for size in sizes:
        if size < block_size and after_small:
            runs[-1] += size
        else:
            runs.append(size)
        after_small = size < block_size
    ends = np.cumsum([0, *runs], dtype=np.int64)
    pieces = [np.arange(begin, end, block_size) for begin, end in pairwise(ends)]
    return np.concatenate([*pieces, ends[-1:]])


def payload_offsets(starts: IndexArray, bits: int) -> IndexArray:
    """Return the position of every block in a payload of 1, 4 or 8 bits per value.

    Args:
        starts: int64 [m + 1], from `cut`.
        bits: 1, 4 or 8.
    Returns:
        int64 [m + 1]: the first byte of each block, then the length of the payload.
    """
    groups = -(-np.diff(starts) // GROUP)
    encoded = _LEVEL_BYTES[bits] + groups * (GROUP // 8) * bits
    lengths = np.minimum(encoded, 4 * np.diff(starts))
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
