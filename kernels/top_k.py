"""The values of largest magnitude of each block, in Numba: see `top_k_reference`.

The smallest magnitude to send is found by counting: how many values are at least as large as a
guess? The guesses are bisected as words (the bits of a magnitude ascend with it), beginning with
the result of the block before, until few values are left to sort. Each count is vector code on a
block in the first-level cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import simd
from .blocks import GROUP, Blocks
from .compiled import block_at, compiled, decode_raw, encode_raw
from .reference import Array
from .top_k_reference import LEVELS_BYTES, VALUE_BITS, position_bits

F32, U32, U64, I32 = np.float32, np.uint32, np.uint64, np.int32
MAGNITUDE = U32(0x7FFFFFFF)  #: of the bits of a float32
ABOVE_ALL = 0x7F800000  #: larger than the word of any finite magnitude
SPARE = 64  #: values: so many more than needed are sorted
FIRST_STRIDE = 1 << 20  #: of guesses: an eighth of a power of two

_word, _float = simd.float_to_word, simd.word_to_float


def encode_top_k(
    kept: int, block_size: int, blocks: Blocks, gradient: Array, residual: Array, payload: Array
) -> None:
    found = np.empty(kept + SPARE, np.uint32)
    bits = position_bits(block_size)
    _encode(
        kept, block_size, bits, blocks.starts, blocks.offsets, gradient, residual, payload, found
    )


def decode_top_k(
    kept: int, block_size: int, blocks: Blocks, payload: Array, out: Array, add: bool
) -> None:
    bits = position_bits(block_size)
    _decode(kept, block_size, bits, blocks.starts, blocks.offsets, payload, out, add)


@compiled
def _count(r: Array, at: int, n: int, least: int) -> int:
    """Count the magnitudes of at least `least`, given as a word."""
    count, word = I32(0), I32(least)
    for i in range(at, at + n):
        count += I32(_word(r[i]) & MAGNITUDE) >= word
    return int(count)


@compiled
def _least(r: Array, at: int, n: int, places: int, guess: int, found: Array) -> tuple[int, int]:
    """Find the smallest magnitude to send, as a word of at least 1.

    Args:
        guess: where the search begins.
        found: uint32 [places + SPARE], overwritten.
    Returns:
        The word, and the number of values to send with just this word.
    """
    # At least `places` magnitudes are >= low, and fewer are >= high.
    low, high, at_low, at_high = 0, ABOVE_ALL, n, 0
    stride, word = FIRST_STRIDE, min(max(guess, 1), ABOVE_ALL - 1)
    while at_low > places + SPARE and high - low > 1:
        count = _count(r, at, n, word)
        if count >= places:
            low, at_low = word, count
        else:
            high, at_high = word, count
        if low == 0:
            word = max(word - stride, 1)
        elif high == ABOVE_ALL:
            word = min(word + stride, ABOVE_ALL - 1)
        else:
            word = (low + high) // 2
        stride *= 2
    if at_low > places + SPARE:  # all values >= low and < high are equal
        return (low, places - at_high) if low > 0 else (1, places)
    count = 0
    for i in range(at, at + n):
        bits = _word(r[i]) & MAGNITUDE
        if bits >= U32(low) and bits > 0:
            found[count] = bits
            count += 1
    if count < places:  # the others are zeros
        return 1, places
    found[:count].sort()
    least = found[count - places]
    above = 0
    while above < places and found[count - 1 - above] > least:
        above += 1
    return int(least), places - above


@compiled
def _lanes_to_sum(lanes: Array) -> Any:
    half = GROUP // 2
    while half > 0:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    return lanes[0]


@compiled
def _encode(
    kept: int,
    block_size: int,
    bits: int,
    starts: Array,
    offsets: Array,
    g: Array,
    r: Array,
    payload: Array,
    found: Array,
) -> None:
    positions, guess = np.empty(kept, np.int32), 1 << 29
    lanes, low_lanes = np.empty(GROUP, np.float32), np.empty(GROUP, np.float32)
    for block in range(len(starts) - 1):
        at, n, byte, raw = block_at(starts, offsets, block)
        if raw:
            encode_raw(g, r, payload, at, byte, n)
            continue
        for i in range(at, at + n):
            r[i] += g[i]
        places = (kept * n + block_size - 1) // block_size
        least, ties = _least(r, at, n, places, guess, found)
        guess, count = least, 0
        lanes[:] = 0
        for i in range(n):
            word = _word(r[at + i]) & MAGNITUDE
            if word >= U32(least):
                if word == U32(least):
                    if ties == 0:
                        continue
                    ties -= 1
                positions[count] = i
                count += 1
                lanes[i % GROUP] += _float(word)
        mean = _lanes_to_sum(lanes) / F32(count) if count > 0 else F32(0)
        lanes[:] = 0
        low_lanes[:] = 0
        high_count = 0
        for j in range(count):
            i = positions[j]
            magnitude = _float(_word(r[at + i]) & MAGNITUDE)
            if magnitude >= mean:
                lanes[i % GROUP] += magnitude
                high_count += 1
            else:
                low_lanes[i % GROUP] += magnitude
        low_count = count - high_count
        low = _lanes_to_sum(low_lanes) / F32(low_count) if low_count > 0 else F32(0)
        high = _lanes_to_sum(lanes) / F32(high_count) if high_count > 0 else F32(0)
        simd.set_level(payload, byte, low)
        simd.set_level(payload, byte + 4, high)
        end = offsets[block + 1] - offsets[0]
        byte += LEVELS_BYTES
        packed, filled = U64(0), 0
        for j in range(count):
            i = positions[j]
            v = r[at + i]
            is_high = _float(_word(v) & MAGNITUDE) >= mean
            field = U64(i) | U64(is_high) << U64(bits) | U64(v < 0) << U64(bits + 1)
            packed |= field << U64(filled)
            filled += bits + VALUE_BITS
            while filled >= 8:
                payload[byte] = packed & U64(255)
                packed >>= U64(8)
                filled -= 8
                byte += 1
            q = high if is_high else low
            r[at + i] = v + q if v < 0 else v - q
        if filled > 0:
            payload[byte] = packed
            byte += 1
        payload[byte:end] = 0


@compiled
def _decode(
    kept: int,
    block_size: int,
    bits: int,
    starts: Array,
    offsets: Array,
    payload: Array,
    out: Array,
    add: bool,
) -> None:
    for block in range(len(starts) - 1):
        at, n, byte, raw = block_at(starts, offsets, block)
        if raw:
            decode_raw(payload, out, byte, at, n, add)
            continue
        if not add:
            out[at : at + n] = 0
        low, high = simd.get_level(payload, byte), simd.get_level(payload, byte + 4)
        byte += LEVELS_BYTES
        packed, filled, before = U64(0), 0, -1
        for _ in range((kept * n + block_size - 1) // block_size):
            while filled < bits + VALUE_BITS:
                packed |= U64(payload[byte]) << U64(filled)
                filled += 8
                byte += 1
            position = int(packed & U64((1 << bits) - 1))
            if position <= before or position >= n:
                break
            q = high if packed >> U64(bits) & U64(1) else low
            out[at + position] += -q if packed >> U64(bits + 1) & U64(1) else q
            packed >>= U64(bits + VALUE_BITS)
            filled -= bits + VALUE_BITS
            before = position
