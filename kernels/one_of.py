"""One of 8, 16 or 32 values, in Numba: `lanes` for full blocks, and plain loops for all others."""

from __future__ import annotations

import numpy as np

from . import lanes, simd
from .compiled import block_at, compiled, decode_raw, encode_raw
from .reference import ROTATION, SMALLEST_LARGEST, Array

U8, U32 = np.uint8, np.uint32
_word, _float = simd.float_to_word, simd.word_to_float
_SMALLEST = SMALLEST_LARGEST.view(U32)
_FULL = lanes.FULL


@compiled
def encode(
    group: int, shift: int, starts: Array, offsets: Array, g: Array, r: Array, payload: Array
) -> None:
    longest = 0
    for i in range(len(starts) - 1):
        longest = max(longest, starts[i + 1] - starts[i])
    largest, place = np.empty(longest // group + 1, U32), np.empty(longest // group + 1, U8)
    for i in range(len(starts) - 1):
        at, n, byte, raw = block_at(starts, offsets, i)
        if raw:
            encode_raw(g, r, payload, at, byte, n)
        elif n == _FULL and group == 8:
            lanes.encode_full_8(g, r, payload, at, byte)
        elif n == _FULL and group == 16:
            lanes.encode_full_16(g, r, payload, at, byte)
        elif n == _FULL:
            lanes.encode_full_32(g, r, payload, at, byte)
        else:
            _encode_block(group, shift, g, r, payload, at, byte, n, largest, place)


@compiled
def _encode_block(
    group: int,
    shift: int,
    g: Array,
    r: Array,
    payload: Array,
    at: int,
    byte: int,
    n: int,
    largest: Array,
    place: Array,
) -> None:
    """
    Args:
        largest, place: uint32 and uint8 [at least the lanes], room.
    """
    columns, none = -(-n // group), (1 << shift) - 1
    for lane in range(columns):
        largest[lane], place[lane] = 0, 0
    for row in range(group):
        turn = (ROTATION * row) % columns
        begin, end = row * columns, min((row + 1) * columns, n)
        for i in range(begin, end):
            v = g[at + i] + r[at + i]
            r[at + i] = v
            column = i - begin
            lane = column - turn if column >= turn else column - turn + columns
            magnitude = _word(v) & U32(0x7FFFFFFF)
            if magnitude > largest[lane]:
                largest[lane], place[lane] = magnitude, row
    s = U32(0)
    for lane in range(columns):
        s = max(s, largest[lane])
    simd.set_level(payload, byte, _float(s))
    byte += 4
    for lane in range(columns):
        m, code = largest[lane], none
        c = (s - m + U32(1 << 22)) >> U32(23)
        if m > 0 and c < none and s >= _SMALLEST:
            row = int(place[lane])
            i = at + row * columns + (lane + ROTATION * row) % columns
            sign = _word(r[i]) & U32(0x80000000)
            r[i] -= _float((s - (c << U32(23))) | sign)
            code = (sign >> U32(24)) | (row << shift) | c
        payload[byte + lane] = code
    for lane in range(columns, -(-columns // 4) * 4):
        payload[byte + lane] = 0


@compiled
def decode(
    group: int,
    shift: int,
    starts: Array,
    offsets: Array,
    payload: Array,
    out: Array,
    add: bool,
    stream: bool,
) -> None:
    for i in range(len(starts) - 1):
        at, n, byte, raw = block_at(starts, offsets, i)
        streams = stream and simd.begins_a_line(out, at)
        if raw:
            decode_raw(payload, out, byte, at, n, add)
        elif n != _FULL:
            _decode_block(group, shift, payload, out, byte, at, n, add)
        elif group == 8:
            if add:
                lanes.add_full_8(payload, out, byte, at)
            elif streams:
                lanes.stream_full_8(payload, out, byte, at)
            else:
                lanes.decode_full_8(payload, out, byte, at)
        elif group == 16:
            if add:
                lanes.add_full_16(payload, out, byte, at)
            elif streams:
                lanes.stream_full_16(payload, out, byte, at)
            else:
                lanes.decode_full_16(payload, out, byte, at)
        else:
            if add:
                lanes.add_full_32(payload, out, byte, at)
            elif streams:
                lanes.stream_full_32(payload, out, byte, at)
            else:
                lanes.decode_full_32(payload, out, byte, at)
    if stream:
        simd.finish_stores()


@compiled
def _decode_block(
    group: int, shift: int, payload: Array, out: Array, byte: int, at: int, n: int, add: bool
) -> None:
    columns, none = -(-n // group), U32((1 << shift) - 1)
    s = _word(simd.get_level(payload, byte))
    byte += 4
    if not add:
        simd.fill_zeros(out, at, n)
    for lane in range(columns):
        code = U32(payload[byte + lane])
        c, row = code & none, int((code >> U32(shift)) & U32(group - 1))
        i = row * columns + (lane + ROTATION * row) % columns
        if c != none and i < n:
            q = _float((s - (c << U32(23))) | ((code & U32(0x80)) << U32(24)))
            out[at + i] = out[at + i] + q if add else q
