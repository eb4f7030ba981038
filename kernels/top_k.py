"""The values of largest magnitude of each block, in Numba: see `top_k_reference`.

The smallest magnitude to send is found by counting: how many values are at least as large as a
guess? Magnitudes are compared as words, the bits of a float32, which ascend with them. The first
guess is the result of the block before; further guesses are interpolated, since the logarithm of a
count falls about linearly with the word. Once few values are left they are sorted. Each count is
vector code on a block in the first-level cache.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import simd
from .blocks import GROUP, Blocks
from .compiled import block_at, compiled, decode_raw, encode_raw
from .reference import Array
from .top_k_reference import LEVELS_BYTES, VALUE_BITS, position_bits

F32, U32, U64, I32 = np.float32, np.uint32, np.uint64, np.int32
MAGNITUDE = U32(0x7FFFFFFF)  #: of the bits of a float32
SPARE = 64  #: values: so many more than needed are sorted
OCTAVE = 1 << 23  #: words between a magnitude and its double

_word = simd.float_to_word


def encode_top_k(
    kept: int, block_size: int, blocks: Blocks, gradient: Array, residual: Array, payload: Array
) -> None:
    bits = position_bits(block_size)
    starts, offsets = blocks.starts, blocks.offsets
    _encode(kept, block_size, bits, starts, offsets, gradient, residual, payload)


def decode_top_k(
    kept: int, block_size: int, blocks: Blocks, payload: Array, out: Array, add: bool
) -> None:
    bits = position_bits(block_size)
    _decode(kept, block_size, bits, blocks.starts, blocks.offsets, payload, out, add)


@compiled
def _add(v: Array, g: Array) -> int:
    """Add g to v. Return the largest magnitude of v, as a word."""
    largest = I32(0)
    for i in range(len(v)):
        v[i] += g[i]
        largest = max(largest, I32(_word(v[i]) & MAGNITUDE))
    return int(largest)


@compiled
def _count(v: Array, least: int) -> int:
    """Count the magnitudes of at least `least`, given as a word."""
    count, word = I32(0), I32(least)
    for i in range(len(v)):
        count += I32(I32(_word(v[i]) & MAGNITUDE) >= word)
    return int(count)


@compiled
def _bracket(v: Array, places: int, largest: int, guess: int) -> tuple[int, int, int]:
    """Find a word that at least `places` magnitudes reach, but few more, or only equal ones.

    Args:
        largest: of the magnitudes, as a word.
        guess: where the search begins.
    Returns:
        The word; the number of magnitudes that reach it; and that of larger words if too many are
        equal to the word, else 0.
    """
    low, at_low, high, at_high = 0, len(v), largest + 1, 0
    stride, halve = OCTAVE // 4, False
    word = guess if 0 < guess <= largest else max(1, largest - OCTAVE // 2)
    while at_low > places + SPARE and high - low > 1:
        count = _count(v, word)
        if count >= places:
            low, at_low = word, count
        else:
            high, at_high = word, count
        if low == 0:  # magnitudes may be of any size: go down in growing steps
            word = max(word - stride, 1)
            stride *= 2
        else:
            part = 0.5
            if not halve:
                wanted = places + SPARE / 2
                part = math.log(at_low / wanted) / math.log(at_low / max(at_high, 0.5))
            halve = not halve
            word = min(max(low + int((high - low) * part), low + 1), high - 1)
    return low, at_low, at_high if at_low > places + SPARE else 0


@compiled
def _select(
    v: Array, places: int, largest: int, guess: int, positions: Array, words: Array
) -> tuple[int, int]:
    """Find the values to send.

    Args:
        positions: int32 [places + SPARE], written: ascending.
        words: uint32 [places + SPARE], overwritten.
    Returns:
        The number of values, at most `places`, and the smallest magnitude as a word.
    """
    low, reached, above = _bracket(v, places, largest, guess)
    least, ties = U32(max(low, 1)), places  # zeros are not sent
    if low and above:
        ties = places - above
    count = 0
    if reached <= places + SPARE:
        for i in range(len(v)):
            word = _word(v[i]) & MAGNITUDE
            if word >= least:
                positions[count] = i
                words[count] = word
                count += 1
        if count <= places:
            return count, int(least)
        ordered = np.sort(words[:count])
        least = ordered[count - places]
        ties = places - (count - np.searchsorted(ordered, least, side="right"))
        found, count = count, 0
        for j in range(found):
            if words[j] > least or (words[j] == least and ties > 0):
                ties -= words[j] == least
                positions[count] = positions[j]
                count += 1
        return count, int(least)
    for i in range(len(v)):
        word = _word(v[i]) & MAGNITUDE
        if word > least or (word == least and ties > 0):
            ties -= word == least
            positions[count] = i
            count += 1
    return count, int(least)


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
) -> None:
    positions, guess = np.empty(kept + SPARE, np.int32), 0
    words = np.empty(kept + SPARE, np.uint32)
    lanes, low_lanes = np.empty(GROUP, np.float32), np.empty(GROUP, np.float32)
    for block in range(len(starts) - 1):
        at, n, byte, raw = block_at(starts, offsets, block)
        if raw:
            encode_raw(g, r, payload, at, byte, n)
            continue
        values = r[at : at + n]
        largest = _add(values, g[at : at + n])
        places = (kept * n + block_size - 1) // block_size
        count, guess = _select(values, places, largest, guess, positions, words)
        lanes[:] = 0
        for j in range(count):
            i = positions[j]
            lanes[i % GROUP] += abs(values[i])
        mean = _lanes_to_sum(lanes) / F32(count) if count > 0 else F32(0)
        lanes[:] = 0
        low_lanes[:] = 0
        high_count = 0
        for j in range(count):
            i = positions[j]
            magnitude = abs(values[i])
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
            v = values[i]
            is_high = abs(v) >= mean
            field = U64(i) | U64(is_high) << U64(bits) | U64(v < 0) << U64(bits + 1)
            packed |= field << U64(filled)
            filled += bits + VALUE_BITS
            while filled >= 8:
                payload[byte] = packed & U64(255)
                packed >>= U64(8)
                filled -= 8
                byte += 1
            q = high if is_high else low
            values[i] = v + q if v < 0 else v - q
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
