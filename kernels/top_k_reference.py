"""The values of largest magnitude of each block, in plain NumPy.

    v = g + r      q = sign(v) * level of v if v is sent, else 0      r' = v - q

Of a block of n values, `kept_of` values are sent: those of largest magnitude, of equal ones those
that come first, and no zeros. A level is the mean magnitude of one of two classes: of the values
below the mean of all that are sent, and of the others.

The payload of a block with `kept` places; all numbers are little-endian:

==================  ===============================================================================
float32 low, high   the two levels
kept fields         of `position_bits` + 2 bits each, from the lowest bit, up to whole words of 4
                    bytes: the position, a bit that selects the level high, and a bit that is set
                    if the value is negative
==================  ===============================================================================

Fields ascend by position. The list ends before a field that does not ascend, so unused places hold
zeros; the first field is always in use, with levels of 0 in a block of zeros. A block is sent as n
float32 if encoding would not make it smaller.

Sums run in the order of `reference.lane_sum`.

Source: top-k of chunks, with two bits for each value: Sarfi et al., "Communication Efficient LLM
Pre-training with SparseLoCo", 2025 (arXiv 2508.15706), section 3, which keeps 64 of 4096. Theirs
has levels of four classes of values.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .blocks import GROUP, Blocks, IndexArray

Array = npt.NDArray[Any]
SizeT = TypeVar("SizeT", int, IndexArray)
F32 = np.float32

LEVELS_BYTES = 8
VALUE_BITS = 2


def position_bits(block_size: int) -> int:
    """Return the bits of a position in blocks of at most this number of values."""
    return max(1, (block_size - 1).bit_length())


def kept_of(sizes: SizeT, kept: int, block_size: int) -> SizeT:
    """Return the number of places for blocks of these sizes.

    Args:
        sizes: of the blocks, at most `block_size`: int64 [m], or of one block.
        kept: places of a full block; shorter blocks have the same part of them, rounded up.
    """
    return -(-kept * sizes // block_size)


def top_k_offsets(starts: IndexArray, kept: int, block_size: int) -> IndexArray:
    """Return the position of every block in a payload, as `blocks.payload_offsets` does."""
    sizes = np.diff(starts)
    fields = kept_of(sizes, kept, block_size) * (position_bits(block_size) + VALUE_BITS)
    lengths = np.minimum(LEVELS_BYTES + 4 * -(-fields // 32), 4 * sizes)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def encode_top_k(
    kept: int, block_size: int, blocks: Blocks, gradient: Array, residual: Array, payload: Array
) -> None:
    """Send the values of largest magnitude of each block.

    Args:
        kept: places of a full block, at least 1.
        block_size: values of a full block.
        gradient, residual: float32 [n]; the residual is replaced by v - q.
        payload: uint8 [bytes of `blocks`], written.
    """
    bits = position_bits(block_size)
    for g, r, out in blocks.views(gradient, residual, payload):
        v = g + r
        if out.nbytes == 4 * v.size:
            out.view(F32)[:], r[:] = v, 0
            continue
        magnitude, places = np.abs(v), kept_of(v.size, kept, block_size)
        by_size = np.argsort(-magnitude, kind="stable")[:places]
        sent = np.zeros(v.size, bool)
        sent[by_size] = magnitude[by_size] > 0
        mean = _mean(magnitude, sent)
        is_high = sent & (magnitude >= mean)
        levels = _mean(magnitude, sent & ~is_high), _mean(magnitude, is_high)
        positions = np.flatnonzero(sent)
        fields = positions | is_high[sent] << bits | (v < 0)[sent] << (bits + 1)
        out[:] = 0
        out[:LEVELS_BYTES].view(F32)[:] = levels
        columns = np.arange(bits + VALUE_BITS)
        packed = np.packbits(fields[:, None] >> columns & 1, bitorder="little")
        out[LEVELS_BYTES : LEVELS_BYTES + packed.size] = packed
        q = np.copysign(np.where(is_high, levels[1], levels[0]), v)
        r[:] = np.where(sent, v - q, v)


def decode_top_k(
    kept: int, block_size: int, blocks: Blocks, payload: Array, out: Array, add: bool
) -> None:
    """Decode a payload of `encode_top_k`: ``out = q``, or with `add` ``out += q``."""
    bits = position_bits(block_size)
    width = bits + VALUE_BITS
    for coded, x in blocks.views(payload, out):
        if coded.nbytes == 4 * x.size:
            x[:] = x + coded.view(F32) if add else coded.view(F32)
            continue
        if not add:
            x[:] = 0
        levels = coded[:LEVELS_BYTES].view(F32)
        places = kept_of(x.size, kept, block_size)
        unpacked = np.unpackbits(coded[LEVELS_BYTES:], count=places * width, bitorder="little")
        before = -1
        for field in unpacked.reshape(places, width).astype(np.int64) @ (1 << np.arange(width)):
            position = int(field & ((1 << bits) - 1))
            if position <= before or position >= x.size:
                break
            q = levels[field >> bits & 1]
            x[position] += -q if field >> (bits + 1) else q
            before = position


def _mean(magnitude: Array, members: Array) -> F32:
    """Return the mean of some values, 0 of none. The sum has the order of `reference.lane_sum`."""
    count = np.count_nonzero(members)
    lanes = np.zeros(GROUP, F32)
    np.add.at(lanes, np.flatnonzero(members) % GROUP, magnitude[members])
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half:]
    return F32(lanes[0]) / F32(count) if count else F32(0)
