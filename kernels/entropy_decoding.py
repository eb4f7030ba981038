"""Decoding of the entropy code in Numba: messages of `entropy_reference`, 64 bits at a time.

In a block with many live values, the values are first decoded side by side, then spread over the
block by a vector instruction. In a block with few live values, they are added one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import entropy_simd, simd
from .compiled import compiled
from .entropy_reference import BLOCK, DAMAGED, GROUPS, LARGEST, NO_SIZES, RAW, Array
from .words import U64, count_bits, funnel, has_avx2, load_word, lowest_bit, spread_bits

F32, U32 = np.float32, np.uint32
WORDS = BLOCK // 64
FETCHED = BLOCK // 64  #: a block with more live values is prefetched as a whole
SPARE = 128  #: bytes, or values, that may be read or written beyond the end of a block
MOST_BYTES = 2 * BLOCK  #: of the payload of a block
FOUR_ONES = 0x1111111111111111


def decode_entropy(payload: Array, out: Array, add: bool) -> int:
    return int(decode(payload, out, add))


@compiled
def decode(payload: Array, out: Array, add: bool) -> Any:
    n = len(out)
    blocks = (n + BLOCK - 1) // BLOCK
    head = 8 + 4 * ((blocks + 31) // 32)  # as `head_bytes` says
    if len(payload) < head:
        return DAMAGED
    total, step = int(_get_u32(payload, 0)), simd.get_level(payload, 4)
    found = 0
    for j in range(8, head, 4):
        found += count_bits(U64(_get_u32(payload, j)))
    at = head + 4 * found
    if blocks & 31 and _get_u32(payload, head - 4) >> U32(blocks & 31):
        return DAMAGED
    if at > total or total > len(payload) or not 0 < step < np.inf:
        return DAMAGED
    masks, signs = np.empty(WORDS, np.uint64), np.empty(WORDS, np.uint64)
    planes, alive = np.empty(16 * WORDS, np.uint64), np.empty(WORDS, np.uint64)
    gaps, sizes = np.empty(BLOCK + SPARE, np.uint16), np.empty(BLOCK + SPARE, np.uint16)
    q, aside = np.empty(BLOCK + SPARE, np.float32), np.empty(MOST_BYTES + SPARE, np.uint8)
    header_at = head
    for i in range(blocks):
        first = i * BLOCK
        m = min(BLOCK, n - first)
        if not _is_live(payload, i):
            if not add:
                simd.fill_zeros(out, first, m)
            continue
        header = int(_get_u32(payload, header_at))
        header_at += 4
        fetches = i + 1 < blocks and _is_live(payload, i + 1)
        fetches = fetches and (int(_get_u32(payload, header_at)) & 2047) >= FETCHED
        z, nbytes = (header & 2047) + 1, (header >> 11) & 4095
        low, size_low = (header >> 23) & 15, header >> 27
        if low == RAW:
            if header != RAW << 23 or at + 2 * m > total:
                return DAMAGED
            _take_raw(payload, at, out, first, m, step, add)
            at += 2 * m
            continue
        if header >> 31 or z > m or low > GROUPS or at + nbytes > total:
            return DAMAGED
        bits, bit = payload, 8 * at
        if at + nbytes + SPARE > len(payload):  # reading beyond the block would leave the payload
            bits, bit = aside, 0
            for j in range(nbytes):
                aside[j] = payload[at + j]
        at += nbytes

        end = bit + 8 * nbytes
        if fetches:
            entropy_simd.fetch_eighth(out, first + BLOCK, 0)
            entropy_simd.fetch_eighth(out, first + BLOCK, 1)
        if low == GROUPS:
            bit = _take_groups(bits, bit, end, z, m, masks)
        elif low:
            bit = _take_gaps(bits, bit, end, z, low, m, planes, alive, gaps)
        else:
            bit = _take_masks(bits, bit, end, z, m, masks)
        if fetches:
            entropy_simd.fetch_eighth(out, first + BLOCK, 2)
            entropy_simd.fetch_eighth(out, first + BLOCK, 3)
        if bit < 0 or bit + z > end:
            return DAMAGED
        for c in range((z + 63) >> 6):
            signs[c] = _bits_at(bits, bit + 64 * c)
        bit += z
        if fetches:
            entropy_simd.fetch_eighth(out, first + BLOCK, 4)
            entropy_simd.fetch_eighth(out, first + BLOCK, 5)
        if size_low == NO_SIZES:
            for c in range((z + 63) >> 6):
                entropy_simd.clear(sizes, 64 * c)
        elif _take_sizes(bits, bit, end, z, size_low, planes, alive, sizes) < 0:
            return DAMAGED
        if fetches:
            entropy_simd.fetch_eighth(out, first + BLOCK, 6)
            entropy_simd.fetch_eighth(out, first + BLOCK, 7)
        for c in range((z + 63) >> 6):
            entropy_simd.dequantize(sizes, 64 * c, signs[c], step, q)
        if low == GROUPS or low == 0:
            _spread(out, first, m, masks, q, add)
        else:
            if not add:
                simd.fill_zeros(out, first, m)
            place = U64(first) - U64(1)
            for j in range(z):
                place += U64(gaps[j]) + U64(1)
                out[place] = out[place] + q[j] if add else q[j]
    return total if at == total else DAMAGED


@compiled
def _is_live(payload: Array, block: int) -> bool:
    return bool((_get_u32(payload, 8 + 4 * (block >> 5)) >> U32(block & 31)) & U32(1))


@compiled
def _take_raw(
    payload: Array, at: int, out: Array, first: int, m: int, step: float, add: bool
) -> None:
    """Decode a block that holds all k as int16."""
    for j in range(m):
        k = np.int16(payload[at + 2 * j] | payload[at + 2 * j + 1] << 8)
        if not add:
            out[first + j] = F32(k) * step
        elif k != 0:  # adding 0 would change -0
            out[first + j] += F32(k) * step


@compiled
def _spread(out: Array, first: int, m: int, masks: Array, q: Array, add: bool) -> None:
    """Add q to the marked places of a block, or set these and zero the rest."""
    i = 0
    whole = m >> 6 if has_avx2() else 0
    for j in range(whole):
        if add:
            i = entropy_simd.add_marked(out, first + 64 * j, masks[j], q, i)
        else:
            i = entropy_simd.set_marked(out, first + 64 * j, masks[j], q, i)
    if not add:
        simd.fill_zeros(out, first + 64 * whole, m - 64 * whole)
    for j in range(whole, (m + 63) >> 6):
        mask = masks[j]
        while mask:
            place = U64(first + 64 * j + lowest_bit(mask))
            out[place] = out[place] + q[i] if add else q[i]
            mask &= mask - U64(1)
            i += 1


@compiled
def _take_groups(bits: Array, bit: int, end: int, z: int, m: int, masks: Array) -> Any:
    """Read the masks of live values, from a bit for each group of 4. Return the end, or DAMAGED."""
    groups = (m + 3) >> 2
    if bit + groups > end:
        return DAMAGED
    at, found = bit + groups, 0
    for j in range((groups + 15) >> 4):
        marked = spread_bits(_bits_at(bits, bit + 16 * j), U64(FOUR_ONES))
        if groups - 16 * j < 16:
            marked &= (U64(1) << U64(4 * (groups - 16 * j))) - U64(1)
        marked = (marked << U64(4)) - marked
        count = count_bits(marked)
        if at + count > end:
            return DAMAGED
        masks[j] = spread_bits(_bits_at(bits, at), marked)
        found += count_bits(masks[j])
        at += count
    if found != z or (m & 63 and masks[m >> 6] >> U64(m & 63)):
        return DAMAGED
    return at


@compiled
def _take_masks(bits: Array, bit: int, end: int, z: int, m: int, masks: Array) -> Any:
    """Read the masks of live values, from a bit for each value. Return the end, or DAMAGED."""
    if bit + m > end:
        return DAMAGED
    found = 0
    for j in range((m + 63) >> 6):
        masks[j] = _bits_at(bits, bit + 64 * j)
        if m - 64 * j < 64:
            masks[j] &= (U64(1) << U64(m & 63)) - U64(1)
        found += count_bits(masks[j])
    return bit + m if found == z else DAMAGED


@compiled
def _take_gaps(
    bits: Array, bit: int, end: int, z: int, low: int, m: int, planes: Array, alive: Array,
    gaps: Array,
) -> Any:  # fmt: skip
    """Read the gaps before live values. Return the end, or DAMAGED."""
    bit, used = _take_planes(bits, bit, end, z, low, m - 1, planes, alive)
    if bit < 0:
        return DAMAGED
    length = z
    for c in range((z + 63) >> 6):
        entropy_simd.numbers_of_planes(planes, 16 * c, used, gaps, 64 * c)
        length += entropy_simd.sum_shifted(gaps, 64 * c, 0)
    return bit if length <= m else DAMAGED


@compiled
def _take_sizes(
    bits: Array, bit: int, end: int, z: int, low: int, planes: Array, alive: Array, sizes: Array
) -> Any:  # fmt: skip
    """Read |k| - 1 of live values. Return the end, or DAMAGED."""
    bit, used = _take_planes(bits, bit, end, z, low, LARGEST - 1, planes, alive)
    if bit < 0:
        return DAMAGED
    either = 0
    for c in range((z + 63) >> 6):
        either |= entropy_simd.numbers_of_planes(planes, 16 * c, used, sizes, 64 * c)
    if either >= LARGEST:
        for j in range(z):
            if sizes[j] >= LARGEST:
                return DAMAGED
    return bit


@compiled
def _take_planes(
    bits: Array, bit: int, end: int, count: int, low: int, most: int, planes: Array, alive: Array
) -> Any:  # fmt: skip
    """Read numbers as planes of their binary digits: plane j of chunk c to planes[16 * c + j].

    Returns the bit after the numbers and the number of planes; or DAMAGED. DAMAGED includes upper
    planes of a number larger than `most`; callers check the low planes. The ones of a number in the
    upper planes are counted in binary, 64 numbers at a time: bit `flip` of the count is in plane
    low + flip.
    """
    chunks = (count + 63) >> 6
    if bit + count * (low + 1) > end:
        return DAMAGED, 0
    set_bits(alive, count)
    for c in range(chunks):
        for j in range(low, 16):
            planes[16 * c + j] = U64(0)
    for j in range(low):
        for c in range(chunks):
            planes[16 * c + j] = _bits_at(bits, bit + 64 * c) & alive[c]
        bit += count
    left, t, used = count, 1, low
    while left:
        if bit + left > end:
            return DAMAGED, 0
        flips = 1 + lowest_bit(U64(t))  # bits that change as a count goes from t - 1 to t
        left = 0
        for c in range(chunks):
            before = alive[c]
            if before:
                now = spread_bits(_bits_at(bits, bit), before)
                bit += count_bits(before)
                alive[c] = now
                left += count_bits(now)
                planes[16 * c + low] ^= now
                if flips > 1:
                    planes[16 * c + low + 1] ^= now
                    for flip in range(2, flips):
                        planes[16 * c + low + flip] ^= now
        if left:
            if t << low > most:
                return DAMAGED, 0
            used = max(used, low + flips)
        t += 1
    return bit, used


@compiled
def set_bits(alive: Array, count: int) -> None:
    """Set the lowest `count` bits."""
    for c in range(count >> 6):
        alive[c] = ~U64(0)
    if count & 63:
        alive[count >> 6] = (U64(1) << U64(count & 63)) - U64(1)


@compiled
def _bits_at(bits: Array, bit: int) -> Any:
    """Return 64 bits from any bit. The 16 bytes from its word are read."""
    byte = (bit >> 6) << 3
    return funnel(load_word(bits, byte + 8), load_word(bits, byte), bit & 63)


@compiled
def _get_u32(payload: Array, byte: int) -> Any:
    return simd.float_to_word(simd.get_level(payload, byte))
