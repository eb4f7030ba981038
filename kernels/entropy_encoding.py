"""Encoding of the entropy code in Numba: the bytes of `entropy_reference`, 64 values at a time.

A block is quantized as it is loaded from memory, to integers in the first-level cache. `_squeeze`
packs the live values side by side, and all later loops run over chunks of 64 live values. So a zero
value costs only its quantization. Meanwhile the next block is fetched.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import entropy_simd, simd
from .compiled import compiled
from .entropy_decoding import FOUR_ONES, MOST_BYTES, SPARE, WORDS, decode, set_bits
from .entropy_reference import (
    BLOCK,
    GROUPS,
    LARGEST,
    NO_SIZES,
    RAW,
    SPARSE,
    Array,
    checked_step,
    doubled,
)
from .entropy_simd import AHEAD
from .words import (
    U64,
    compresses,
    count_bits,
    has_avx2,
    load_word,
    pack_bits,
    store_word,
)

F32, U32 = np.float32, np.uint32
Stream = tuple[Any, Any, Any]  #: the next byte, the number of bits kept for it, and the bits
NO_ROOM = -2  #: in place of a length
EIGHT_ONES = 0x0101010101010101


def _places_of_bits(mask: int) -> int:
    places = [i for i in range(8) if mask >> i & 1]
    return sum(place << 8 * i for i, place in enumerate(places))


OCTETS = np.array([_places_of_bits(mask) for mask in range(256)], np.uint64)
"""For each 8-bit mask: the places of its set bits, a byte each, then zeros."""


def encode_entropy(gradient: Array | None, residual: Array, payload: Array, step: float) -> int:
    used = checked_step(len(residual), payload, step)
    whole = residual if gradient is None else gradient
    length = _encode(whole, residual, payload, used, gradient is not None)
    while length == NO_ROOM:
        used = doubled(used)
        length = _encode(residual, residual, payload, used, False)
    return int(length)


@compiled
def _encode(g: Array, r: Array, payload: Array, step: float, with_gradient: bool) -> Any:
    """Encode with exactly this step. NO_ROOM: the payload is too short, and r = (v - q) + q.

    This function is long because calls of functions for its parts cost 6 % of the time.
    """
    n, inverse = len(r), F32(1) / step
    blocks = (n + BLOCK - 1) // BLOCK
    head = 8 + 4 * ((blocks + 31) // 32)
    first = head + 4 * blocks
    marks, headers = np.zeros((blocks + 31) // 32, np.uint32), np.empty(blocks, np.uint32)
    k16, k8 = np.empty(BLOCK, np.int16), np.empty(BLOCK, np.int8)
    padded, octets = np.empty(BLOCK, np.float32), np.empty(8 * WORDS + 8, np.uint8)
    live8, live16 = np.empty(BLOCK + SPARE, np.int8), np.empty(BLOCK + SPARE, np.int16)
    places = np.empty(BLOCK + SPARE, np.int16)
    gaps, sizes = np.empty(BLOCK + SPARE, np.int16), np.empty(BLOCK + SPARE, np.int16)
    masks, signs = np.empty(WORDS, np.uint64), np.empty(WORDS, np.uint64)
    alive, aside = np.empty(WORDS, np.uint64), np.empty(MOST_BYTES + SPARE, np.uint8)
    found, end, r_ahead = 0, first, AHEAD
    for i in range(blocks):
        at = i * BLOCK
        m = min(BLOCK, n - at)
        bits_of_k = _quantize(g, r, at, m, r_ahead, inverse, step, with_gradient, k16, k8, padded)
        r_ahead = AHEAD  # `_quantize` prefetches the next block
        if bits_of_k == 0:
            continue
        r_ahead = 0  # the next block is prefetched below, in parts

        entropy_simd.fetch_eighth(r, at + AHEAD, 0)
        if bits_of_k <= 127 and has_avx2():
            z = _squeeze(k8, masks, octets, live8, places)
            size_sum = 0
            for c in range((z + 63) >> 6):
                signs[c], more = entropy_simd.sizes_8(live8, 64 * c, sizes)
                size_sum += more
        else:
            z = _squeeze_wide(k16, masks, live16, places)
            size_sum = 0
            for c in range((z + 63) >> 6):
                signs[c], more = entropy_simd.sizes_16(live16, 64 * c, sizes)
                size_sum += more
        entropy_simd.fetch_eighth(r, at + AHEAD, 1)
        if SPARSE * z < m:
            _find_gaps(places, gaps, z)
            entropy_simd.fetch_eighth(r, at + AHEAD, 2)
            low = max(_rice_low(places[z] + 1 - z, z), 1)
            where = _plane_bits(gaps, z, low)
        else:
            low, where = GROUPS, _group_bits(masks, m)
            entropy_simd.fetch_eighth(r, at + AHEAD, 2)
        if where >= m:
            low, where = 0, m
        entropy_simd.fetch_eighth(r, at + AHEAD, 3)
        size_low, size_bits = NO_SIZES, 0
        if size_sum:
            size_low = min(_rice_low(size_sum, z), NO_SIZES - 1)
            size_bits = _plane_bits(sizes, z, size_low)

        nbytes = (where + z + size_bits + 7) >> 3
        raw = nbytes >= 2 * m
        if raw:
            nbytes = 2 * m
        if end + nbytes > len(payload):
            _put_back(g, r, at, m, inverse, step, with_gradient, k16)
            _finish(payload, step, marks, headers, found, head, first, end)
            decode(payload, r, True)
            return NO_ROOM
        marks[i >> 5] |= U32(1) << U32(i & 31)
        if raw:
            headers[found] = RAW << 23
            _put_raw(payload, end, k16, m)
        else:
            headers[found] = (z - 1) | nbytes << 11 | low << 23 | size_low << 27
            direct = end + MOST_BYTES + SPARE <= len(payload)
            out, byte = (payload, end) if direct else (aside, 0)
            fill, kept = 0, U64(0)
            entropy_simd.fetch_eighth(r, at + AHEAD, 4)
            if low == GROUPS:
                byte, fill, kept = _put_groups(out, byte, fill, kept, masks, m)
            elif low:
                byte, fill, kept = _put_planes(out, byte, fill, kept, gaps, z, low, alive)
            else:
                byte, fill, kept = _put_words(out, byte, fill, kept, masks, m)
            entropy_simd.fetch_eighth(r, at + AHEAD, 5)
            byte, fill, kept = _put_words(out, byte, fill, kept, signs, z)
            entropy_simd.fetch_eighth(r, at + AHEAD, 6)
            if size_sum:
                byte, fill, kept = _put_planes(out, byte, fill, kept, sizes, z, size_low, alive)
            store_word(out, byte, kept)
            if not direct:
                for j in range(nbytes):
                    payload[end + j] = aside[j]
        entropy_simd.fetch_eighth(r, at + AHEAD, 7)
        found += 1
        end += nbytes
    return _finish(payload, step, marks, headers, found, head, first, end)


@compiled
def _quantize(
    g: Array, r: Array, at: int, m: int, r_ahead: int, inverse: float, step: float,
    with_gradient: bool, k16: Array, k8: Array, padded: Array,
) -> Any:  # fmt: skip
    """Quantize a block, with k = 0 beyond its end. Return the bitwise or of all |k|."""
    if m == BLOCK:
        if with_gradient:
            return entropy_simd.quantize_sum(g, r, at, r_ahead, inverse, step, k16, k8)
        return entropy_simd.quantize(r, r, at, r_ahead, inverse, step, k16, k8)
    for j in range(m):
        padded[j] = g[at + j] + r[at + j] if with_gradient else r[at + j]
    for j in range(m, BLOCK):
        padded[j] = F32(0)
    bits_of_k = entropy_simd.quantize(padded, padded, 0, 0, inverse, step, k16, k8)
    for j in range(m):
        r[at + j] = padded[j]
    return bits_of_k


@compiled
def _put_back(
    g: Array, r: Array, at: int, m: int, inverse: float, step: float, with_gradient: bool,
    k16: Array,
) -> None:  # fmt: skip
    """Set r = (v - q) + q, for the quantized block and all later blocks."""
    for j in range(m):
        r[at + j] += F32(k16[j]) * step
    for j in range(at + m, len(r)):
        v = g[j] + r[j] if with_gradient else r[j]
        q = min(max(F32(np.rint(v * inverse)), F32(-LARGEST)), F32(LARGEST)) * step
        r[j] = (v - q) + q


@compiled
def _squeeze(k8: Array, masks: Array, octets: Array, live: Array, places: Array) -> Any:
    """Pack the live values of a block side by side, then zeros, and their places into places[1:].

    `masks` receives the masks of live values. Returns the number of live values.
    """
    z = 0
    if compresses():
        for j in range(WORDS):
            masks[j] = entropy_simd.compress_word(k8, 64 * j, live, z, places, z + 1)
            z += count_bits(masks[j])
    elif has_avx2():
        for j in range(WORDS):
            masks[j] = entropy_simd.mark_live(k8, 64 * j)
        mask_of = masks.view(np.uint8)
        for i in range(_list_octets(masks, octets)):
            octet, mask = int(octets[i]), mask_of[octets[i]]
            entropy_simd.squeeze_octet(k8, 8 * octet, OCTETS[mask], live, z, places, z + 1)
            z += count_bits(U64(mask))
    for t in range(0, 64, 8):
        store_word(live, z + t, U64(0))
    return z


@compiled
def _list_octets(masks: Array, octets: Array) -> Any:
    """List the groups of 8 values with live values. Return their number."""
    count = 0
    for j in range(WORDS):
        any_live = masks[j] | masks[j] >> U64(4)
        any_live |= any_live >> U64(2)
        any_live = (any_live | any_live >> U64(1)) & U64(EIGHT_ONES)
        here = OCTETS[pack_bits(any_live, U64(EIGHT_ONES))] + U64(8 * j) * U64(EIGHT_ONES)
        store_word(octets, count, here)
        count += count_bits(any_live)
    return count


@compiled
def _squeeze_wide(k16: Array, masks: Array, live: Array, places: Array) -> Any:
    """Do the same as `_squeeze` for any k, value by value."""
    z = 0
    for j in range(WORDS):
        mask = U64(0)
        for t in range(64):
            k = k16[64 * j + t]
            if k != 0:
                mask |= U64(1) << U64(t)
                live[z], places[z + 1] = k, 64 * j + t
                z += 1
        masks[j] = mask
    entropy_simd.clear(live, z)
    return z


@compiled
def _find_gaps(places: Array, gaps: Array, z: int) -> None:
    """Compute the gap before each live value, then zeros."""
    places[0] = -1
    for first in range(0, z, 64):
        entropy_simd.gaps(places, first, gaps)
    entropy_simd.clear(gaps, z)


@compiled
def _groups_of(mask: int) -> Any:
    """Return the lowest bit of each non-empty group of 4."""
    either = mask | mask >> U64(2)
    return (either | either >> U64(1)) & U64(FOUR_ONES)


@compiled
def _group_bits(masks: Array, m: int) -> Any:
    """Return the number of bits for marks in groups."""
    bits = (m + 3) >> 2
    for j in range(WORDS):
        bits += 4 * count_bits(_groups_of(masks[j]))
    return bits


@compiled
def _rice_low(total: int, count: int) -> Any:
    mean, low = (11 * total) // (16 * count), 0
    while mean:
        mean >>= 1
        low += 1
    return low


@compiled
def _plane_bits(x: Array, count: int, low: int) -> Any:
    """Return the number of bits for numbers in planes."""
    bits = count * (low + 1)
    for first in range(0, count, 64):
        bits += entropy_simd.sum_shifted(x, first, low)
    return bits


@compiled
def _put_raw(payload: Array, byte: int, k16: Array, m: int) -> None:
    """Write all k of a block as int16."""
    for j in range(m):
        payload[byte + 2 * j] = k16[j] & 255
        payload[byte + 2 * j + 1] = (k16[j] >> 8) & 255


@compiled
def _put(out: Array, byte: int, fill: int, kept: Any, bits: Any, count: int) -> Stream:
    """Append `count` bits, 0 to 64, to a stream: the next byte, and `fill` bits kept for it."""
    kept |= bits << U64(fill)
    store_word(out, byte, kept)
    if fill + count >= 64:
        kept = (bits >> U64(1)) >> U64(63 - fill)
    fill += count
    return byte + ((fill >> 6) << 3), fill & 63, kept


@compiled
def _put_words(out: Array, byte: int, fill: int, kept: Any, bits: Array, count: int) -> Stream:
    """Append the first `count` bits of an array of entropy_simd."""
    for c in range((count + 63) >> 6):
        byte, fill, kept = _put(out, byte, fill, kept, bits[c], min(count - 64 * c, 64))
    return byte, fill, kept


@compiled
def _put_groups(out: Array, byte: int, fill: int, kept: Any, masks: Array, m: int) -> Stream:
    """Append a bit for each group of 4 values, then 4 bits for each group with live values."""
    groups = (m + 3) >> 2
    for j in range((groups + 15) >> 4):
        any_live = pack_bits(_groups_of(masks[j]), U64(FOUR_ONES))
        byte, fill, kept = _put(out, byte, fill, kept, any_live, min(groups - 16 * j, 16))
    for j in range((groups + 15) >> 4):
        marked = _groups_of(masks[j])
        marked = (marked << U64(4)) - marked
        bits = pack_bits(masks[j], marked)
        byte, fill, kept = _put(out, byte, fill, kept, bits, count_bits(marked))
    return byte, fill, kept


@compiled
def _put_planes(
    out: Array, byte: int, fill: int, kept: Any, x: Array, count: int, low: int, alive: Array
) -> Stream:
    """Append numbers in planes. x: int16 [count], then zeros up to a multiple of 64."""
    chunks = (count + 63) >> 6
    for j in range(low):
        for c in range(chunks):
            bits = entropy_simd.with_bit(x, 64 * c, 1 << j)
            byte, fill, kept = _put(out, byte, fill, kept, bits, min(count - 64 * c, 64))
    set_bits(alive, count)
    least, any_alive = 1 << low, True
    while any_alive:
        any_alive = False
        for c in range(chunks):
            before = alive[c]
            if before:
                now = entropy_simd.at_least(x, 64 * c, least) if least <= LARGEST else U64(0)
                alive[c] = now
                any_alive |= now != 0
                bits = pack_bits(now, before)
                byte, fill, kept = _put(out, byte, fill, kept, bits, count_bits(before))
        least += 1 << low
    return byte, fill, kept


@compiled
def _finish(
    payload: Array, step: float, marks: Array, headers: Array, found: int, head: int, first: int,
    end: int,
) -> Any:  # fmt: skip
    """Complete a message, and return its length.

    Moves the payloads of the blocks, at bytes `first` to `end`, to the place after `found` headers,
    and writes everything before.
    """
    begin = head + 4 * found
    length = end - first
    whole = length & ~7
    for j in range(0, whole, 8):
        store_word(payload, begin + j, load_word(payload, first + j))
    for j in range(whole, length):
        payload[begin + j] = payload[first + j]
    _set_u32(payload, 0, U32(begin + length))
    simd.set_level(payload, 4, step)
    for j in range(len(marks)):
        _set_u32(payload, 8 + 4 * j, marks[j])
    for j in range(found):
        _set_u32(payload, head + 4 * j, headers[j])
    return begin + length


@compiled
def _set_u32(payload: Array, byte: int, word: int) -> None:
    simd.set_level(payload, byte, simd.word_to_float(word))
