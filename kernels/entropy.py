"""The entropy code in Numba: the bytes of `entropy_reference`, 64 values at a time.

A block is quantized as it comes from memory. Then it lies in the first-level cache, as integers;
`squeeze` puts its live values side by side, and all later loops go over chunks of 64 of these. So
the cost of a value that is 0 is that of quantizing it. Meanwhile the next block is fetched.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import simd, words
from .compiled import compiled
from .entropy_reference import BLOCK, DAMAGED, LARGEST, NO_SIZES, RAW, Array, doubled
from .words import U64, count_bits, funnel, load_word, lowest_bit, pack_bits, store_word

F32, U32 = np.float32, np.uint32
Stream = tuple[Any, Any, Any]  #: the next byte, the number of bits kept for it, and these
WORDS = BLOCK // 64
SPARE = 128  #: values, or bytes, up to which a chunk may be written behind the end of a block
MOST_BYTES = 2 * BLOCK  #: of the payload of a block
NO_ROOM = -2  #: in place of a length
EIGHT_PLACES, EIGHT_ONES = 0x0706050403020100, 0x0101010101010101


def encode_entropy(gradient: Array | None, residual: Array, payload: Array, step: float) -> int:
    whole, used = residual if gradient is None else gradient, F32(step)
    length = _encode(whole, residual, payload, used, gradient is not None)
    while length == NO_ROOM:
        used = doubled(used)
        length = _encode(residual, residual, payload, used, False)
    return int(length)


def decode_entropy(payload: Array, out: Array, add: bool) -> int:
    return int(_decode(payload, out, add))


@compiled
def _encode(g: Array, r: Array, payload: Array, step: float, with_gradient: bool) -> Any:
    """Encode with just this step. NO_ROOM: the payload is too short, and r = (v - q) + q."""
    n, inverse = len(r), F32(1) / step
    blocks = (n + BLOCK - 1) // BLOCK
    head = 8 + 4 * ((blocks + 31) // 32)
    first = head + 4 * blocks
    marks, headers = np.zeros((blocks + 31) // 32, np.uint32), np.empty(blocks, np.uint32)
    k16, k8 = np.empty(BLOCK, np.int16), np.empty(BLOCK, np.int8)
    padded, marked = np.empty(BLOCK, np.float32), np.empty(64, np.uint8)
    live8, live16 = np.empty(BLOCK + SPARE, np.int8), np.empty(BLOCK + SPARE, np.int16)
    places8, places = np.empty(BLOCK + SPARE, np.uint8), np.empty(BLOCK + SPARE, np.int16)
    gaps, sizes = np.empty(BLOCK + SPARE, np.int16), np.empty(BLOCK + SPARE, np.int16)
    masks, signs = np.empty(WORDS, np.uint64), np.empty(WORDS, np.uint64)
    alive, aside = np.empty(WORDS, np.uint64), np.empty(MOST_BYTES + SPARE, np.uint8)
    found, end = 0, first
    for i in range(blocks):
        at = i * BLOCK
        m = min(BLOCK, n - at)
        bits_of_k = _quantize(g, r, at, m, inverse, step, with_gradient, k16, k8, padded)
        if bits_of_k == 0:
            continue

        size_sum = 0
        if bits_of_k <= 127 and words.packs_bits():
            z = _squeeze(k8, marked, masks, live8, places8, r, at + BLOCK)
            for c in range((z + 63) >> 6):
                signs[c], more = words.sizes_8(live8, 64 * c, sizes)
                size_sum += more
        else:
            z = _squeeze_wide(k16, masks, live16, places8)
            for c in range((z + 63) >> 6):
                signs[c], more = words.sizes_16(live16, 64 * c, sizes)
                size_sum += more
        low, where = 0, m
        if 2 * z < m:  # with more, gaps take more bits than there are values
            _find_gaps(masks, places8, places, gaps, z)
            low = max(_rice_low(places[z] + 1 - z, z), 1)
            where = _plane_bits(gaps, z, low)
            if where >= m:
                low, where = 0, m
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
            _decode(payload, r, True)
            return NO_ROOM
        marks[i >> 5] |= U32(1) << U32(i & 31)
        if raw:
            headers[found] = RAW << 23
            for j in range(m):
                payload[end + 2 * j] = k16[j] & 255
                payload[end + 2 * j + 1] = (k16[j] >> 8) & 255
        else:
            headers[found] = (z - 1) | nbytes << 11 | low << 23 | size_low << 27
            direct = end + MOST_BYTES + SPARE <= len(payload)
            out, byte = (payload, end) if direct else (aside, 0)
            fill, kept = 0, U64(0)
            if low:
                byte, fill, kept = _put_planes(out, byte, fill, kept, gaps, z, low, alive)
            else:
                byte, fill, kept = _put_words(out, byte, fill, kept, masks, m)
            byte, fill, kept = _put_words(out, byte, fill, kept, signs, z)
            if size_sum:
                byte, fill, kept = _put_planes(out, byte, fill, kept, sizes, z, size_low, alive)
            store_word(out, byte, kept)
            if not direct:
                for j in range(nbytes):
                    payload[end + j] = aside[j]
        found += 1
        end += nbytes
    return _finish(payload, step, marks, headers, found, head, first, end)


@compiled
def _quantize(
    g: Array, r: Array, at: int, m: int, inverse: float, step: float, with_gradient: bool,
    k16: Array, k8: Array, padded: Array,
) -> Any:  # fmt: skip
    """k of a block, and its residual; the bits that any |k| has. Behind its end k = 0."""
    if m == BLOCK:
        if with_gradient:
            return words.quantize_sum(g, at, r, at, inverse, step, k16, k8)
        return words.quantize(r, at, r, at, inverse, step, k16, k8)
    for j in range(m):
        padded[j] = g[at + j] + r[at + j] if with_gradient else r[at + j]
    for j in range(m, BLOCK):
        padded[j] = F32(0)
    bits_of_k = words.quantize(padded, 0, padded, 0, inverse, step, k16, k8)
    for j in range(m):
        r[at + j] = padded[j]
    return bits_of_k


@compiled
def _put_back(
    g: Array, r: Array, at: int, m: int, inverse: float, step: float, with_gradient: bool,
    k16: Array,
) -> None:  # fmt: skip
    """r = (v - q) + q, of the block that has been quantized, and of all behind it."""
    for j in range(m):
        r[at + j] += F32(k16[j]) * step
    for j in range(at + m, len(r)):
        v = g[j] + r[j] if with_gradient else r[j]
        q = min(max(F32(np.rint(v * inverse)), F32(-LARGEST)), F32(LARGEST)) * step
        r[j] = (v - q) + q


@compiled
def _squeeze(
    k8: Array, marked: Array, masks: Array, live: Array, places: Array, r: Array, ahead: int
) -> Any:
    """Put the live values of a block side by side, then zeros, and their places in their words.

    Returns the number of live values. Meanwhile the block of r from `ahead` on is fetched.
    """
    z = 0
    for j in range(WORDS):
        words.fetch_word(r, ahead + 64 * j)
        if words.compresses():
            mask = words.compress_word(k8, 64 * j, live, places, z)
            z += count_bits(mask)
        else:
            mask = words.mark_live(k8, 64 * j, marked)
            if mask:
                for t in range(0, 64, 8):
                    marks = load_word(marked, t)
                    here = U64(EIGHT_PLACES) + U64(t) * U64(EIGHT_ONES)
                    store_word(live, z, pack_bits(load_word(k8, 64 * j + t), marks))
                    store_word(places, z, pack_bits(here, marks))
                    z += count_bits(marks) >> 3
        masks[j] = mask
    for t in range(0, 64, 8):
        store_word(live, z + t, U64(0))
    return z


@compiled
def _squeeze_wide(k16: Array, masks: Array, live: Array, places: Array) -> Any:
    """`_squeeze` for all k, one by one."""
    z = 0
    for j in range(WORDS):
        mask = U64(0)
        for t in range(64):
            k = k16[64 * j + t]
            if k != 0:
                mask |= U64(1) << U64(t)
                live[z], places[z] = k, t
                z += 1
        masks[j] = mask
    words.clear(live, z)
    return z


@compiled
def _find_gaps(masks: Array, places8: Array, places: Array, gaps: Array, z: int) -> None:
    """Before each live value, then zeros. places[1 + i]: where live value i is; places[0] = -1."""
    places[0] = -1
    i = 0
    for j in range(WORDS):
        count = count_bits(masks[j])
        for first in range(0, count, 16):
            words.widen_places(places8, i + first, 64 * j, places, 1 + i + first)
        i += count
    for first in range(0, z, 64):
        words.gaps(places, first, gaps)
    words.clear(gaps, z)


@compiled
def _rice_low(total: int, count: int) -> Any:
    mean, low = (11 * total) // (16 * count), 0
    while mean:
        mean >>= 1
        low += 1
    return low


@compiled
def _plane_bits(x: Array, count: int, low: int) -> Any:
    """Bits of numbers in planes."""
    bits = count * (low + 1)
    for first in range(0, count, 64):
        bits += words.sum_shifted(x, first, low)
    return bits


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
    """Append `count` bits that lie in words."""
    for c in range((count + 63) >> 6):
        byte, fill, kept = _put(out, byte, fill, kept, bits[c], min(count - 64 * c, 64))
    return byte, fill, kept


@compiled
def _put_planes(
    out: Array, byte: int, fill: int, kept: Any, x: Array, count: int, low: int, alive: Array
) -> Stream:
    """Append numbers in planes. x: int16 [count], then zeros up to a multiple of 64."""
    chunks = (count + 63) >> 6
    for j in range(low):
        for c in range(chunks):
            bits = words.with_bit(x, 64 * c, 1 << j)
            byte, fill, kept = _put(out, byte, fill, kept, bits, min(count - 64 * c, 64))
    _all_alive(alive, count)
    least, any_alive = 1 << low, True
    while any_alive:
        any_alive = False
        for c in range(chunks):
            before = alive[c]
            if before:
                now = words.at_least(x, 64 * c, least) if least <= LARGEST else U64(0)
                alive[c] = now
                any_alive |= now != 0
                bits = pack_bits(now, before)
                byte, fill, kept = _put(out, byte, fill, kept, bits, count_bits(before))
        least += 1 << low
    return byte, fill, kept


@compiled
def _all_alive(alive: Array, count: int) -> None:
    """Set as many bits."""
    for c in range(count >> 6):
        alive[c] = ~U64(0)
    if count & 63:
        alive[count >> 6] = (U64(1) << U64(count & 63)) - U64(1)


@compiled
def _finish(
    payload: Array, step: float, marks: Array, headers: Array, found: int, head: int, first: int,
    end: int,
) -> Any:  # fmt: skip
    """Move what the blocks have, which lies from byte `first` to `end`, behind `found` headers, and
    write all before it. Returns the bytes of the message."""
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
def _decode(payload: Array, out: Array, add: bool) -> Any:
    n = len(out)
    blocks = (n + BLOCK - 1) // BLOCK
    head = 8 + 4 * ((blocks + 31) // 32)
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
    alive, signs = np.empty(WORDS, np.uint64), np.empty(WORDS, np.uint64)
    planes, x = np.empty(16 * WORDS, np.uint64), np.empty(BLOCK + SPARE, np.uint16)
    places, q = np.empty(BLOCK, np.uint16), np.empty(BLOCK + SPARE, np.float32)
    aside = np.empty(MOST_BYTES + SPARE, np.uint8)
    header_at = head
    for i in range(blocks):
        first = i * BLOCK
        m = min(BLOCK, n - first)
        if not _is_live(payload, i):
            if not add:
                simd.fill_zeros(out, first, m)
            continue
        if i + 1 < blocks and _is_live(payload, i + 1):
            for j in range(0, BLOCK, 64):
                words.fetch_word(out, first + BLOCK + j)
        header = int(_get_u32(payload, header_at))
        header_at += 4
        z, nbytes = (header & 2047) + 1, (header >> 11) & 4095
        low, size_low = (header >> 23) & 15, header >> 27
        if low == RAW:
            if header != RAW << 23 or at + 2 * m > total:
                return DAMAGED
            for j in range(m):
                k = np.int16(payload[at + 2 * j] | payload[at + 2 * j + 1] << 8)
                if not add:
                    out[first + j] = F32(k) * step
                elif k != 0:  # adding 0 would change -0
                    out[first + j] += F32(k) * step
            at += 2 * m
            continue
        if header >> 31 or z > m or low > 11 or at + nbytes > total:
            return DAMAGED
        bits, bit = payload, 8 * at
        if at + nbytes + SPARE > len(payload):  # where reading on would leave the payload
            bits, bit = aside, 0
            for j in range(nbytes):
                aside[j] = payload[at + j]
        at += nbytes

        end = bit + 8 * nbytes
        if low:
            bit = _take_gaps(bits, bit, end, z, low, m, planes, alive, x, places)
        else:
            bit = _take_places(bits, bit, end, z, m, places)
        if bit < 0 or bit + z > end:
            return DAMAGED
        for c in range((z + 63) >> 6):
            signs[c] = _bits_at(bits, bit + 64 * c)
        bit += z
        if size_low == NO_SIZES:
            for c in range((z + 63) >> 6):
                words.clear(x, 64 * c)
        elif _take_planes(bits, bit, end, z, size_low, LARGEST - 1, planes, alive, x) < 0:
            return DAMAGED
        for c in range((z + 63) >> 6):
            words.dequantize(x, 64 * c, signs[c], step, q)
        here = out[first : first + m]
        if add:
            for j in range(z):
                here[places[j]] += q[j]
        else:
            simd.fill_zeros(out, first, m)
            for j in range(z):
                here[places[j]] = q[j]
    return total if at == total else DAMAGED


@compiled
def _is_live(payload: Array, block: int) -> bool:
    return bool((_get_u32(payload, 8 + 4 * (block >> 5)) >> U32(block & 31)) & U32(1))


@compiled
def _take_gaps(
    bits: Array, bit: int, end: int, z: int, low: int, m: int, planes: Array, alive: Array,
    gaps: Array, places: Array,
) -> Any:  # fmt: skip
    """Live places from the gaps before them. The bit behind these; or DAMAGED."""
    bit = _take_planes(bits, bit, end, z, low, m - 1, planes, alive, gaps)
    if bit < 0:
        return DAMAGED
    place = -1
    for j in range(z):
        place += int(gaps[j]) + 1
        places[j] = place
    return bit if place < m else DAMAGED


@compiled
def _take_places(bits: Array, bit: int, end: int, z: int, m: int, places: Array) -> Any:
    """Live places from a bit for each value. The bit behind these; or DAMAGED."""
    if bit + m > end:
        return DAMAGED
    j = 0
    for first in range(0, m, 64):
        mask = _bits_at(bits, bit + first)
        if m - first < 64:
            mask &= (U64(1) << U64(m - first)) - U64(1)
        while mask:
            places[j] = first + lowest_bit(mask)
            mask &= mask - U64(1)
            j += 1
    return bit + m if j == z else DAMAGED


@compiled
def _take_planes(
    bits: Array, bit: int, end: int, count: int, low: int, most: int, planes: Array, alive: Array,
    x: Array,
) -> Any:  # fmt: skip
    """x = numbers in planes, none above `most`. The bit behind them; or DAMAGED.

    How often the upper planes say 1 of a number is counted in binary, 64 numbers at a time: bit
    `flip` of the count is in plane low + flip.
    """
    chunks = (count + 63) >> 6
    if bit + count * (low + 1) > end:
        return DAMAGED
    for c in range(chunks):
        for j in range(low, 16):
            planes[16 * c + j] = U64(0)
    for j in range(low):
        for c in range(chunks):
            planes[16 * c + j] = _bits_at(bits, bit + 64 * c)
        bit += count
    _all_alive(alive, count)
    left, t, used = count, 1, low
    while left:
        if bit + left > end:
            return DAMAGED
        flips = 1 + lowest_bit(U64(t))  # of the bits of a count that goes from t - 1 to t
        left = 0
        for c in range(chunks):
            before = alive[c]
            if before:
                now = words.spread_bits(_bits_at(bits, bit), before)
                bit += count_bits(before)
                alive[c] = now
                left += count_bits(now)
                for flip in range(flips):
                    planes[16 * c + low + flip] ^= now
        if left:
            if t << low > most:
                return DAMAGED
            used = max(used, low + flips)
        t += 1
    either = 0
    for c in range(chunks):
        if count - 64 * c < 64:
            inside = (U64(1) << U64(count & 63)) - U64(1)
            for j in range(low):
                planes[16 * c + j] &= inside
        either |= words.numbers_of_planes(planes, 16 * c, used, x, 64 * c)
    if either > most:
        for j in range(count):
            if x[j] > most:
                return DAMAGED
    return bit


@compiled
def _bits_at(bits: Array, bit: int) -> Any:
    """64 bits from a bit on; the 16 bytes from its word on are read."""
    byte = (bit >> 6) << 3
    return funnel(load_word(bits, byte + 8), load_word(bits, byte), bit & 63)


@compiled
def _get_u32(payload: Array, byte: int) -> Any:
    return simd.float_to_word(simd.get_level(payload, byte))


@compiled
def _set_u32(payload: Array, byte: int, word: int) -> None:
    simd.set_level(payload, byte, simd.word_to_float(word))
