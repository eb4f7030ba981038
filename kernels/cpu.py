"""The kernels in Numba: the bytes of `reference` at the speed of memory, on one thread.

The loops inside a block are vector code from `simd`. The second pass over a block (packing) finds
the block in the first-level cache after the first pass (sums), so every value is read from memory
once: encoding at 1 bit moves 12.125 bytes per value, decoding and adding 8.125.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import simd
from .blocks import Blocks
from .compiled import block_at, compiled, decode_raw, encode_raw
from .entropy_decoding import decode_entropy
from .entropy_encoding import encode_entropy
from .low_rank import low_rank_product
from .memory import beyond_caches
from .reference import SMALLEST_STEP, Array
from .steps import (
    adagrad_step,
    adam_step,
    adam_step_of_quantized,
    add_to_groups,
    averaging_step,
    compensate_delay,
    mix,
    momentum_step,
    outer_momentum_step,
    sgd_step,
    weighted_difference,
)
from .top_k import decode_top_k, encode_top_k

__all__ = [
    "adagrad_step",
    "adam_step",
    "adam_step_of_quantized",
    "add_to_groups",
    "averaging_step",
    "compensate_delay",
    "decode_1bit",
    "decode_entropy",
    "decode_half",
    "decode_levels",
    "decode_top_k",
    "encode_1bit",
    "encode_entropy",
    "encode_half",
    "encode_levels",
    "encode_top_k",
    "largest_magnitude",
    "low_rank_product",
    "mix",
    "momentum_step",
    "outer_momentum_step",
    "sgd_step",
    "weighted_difference",
]

F32, U32 = np.float32, np.uint32
_word, _float = simd.float_to_word, simd.word_to_float


def encode_1bit(
    blocks: Blocks, gradient: Array, residual: Array, payload: Array, mean_threshold: bool
) -> None:
    _encode_1bit(blocks.starts, blocks.offsets, gradient, residual, payload, mean_threshold)


def decode_1bit(blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
    _decode_1bit(blocks.starts, blocks.offsets, payload, out, add, beyond_caches(out))


def encode_levels(
    bits: int, blocks: Blocks, gradient: Array, residual: Array, payload: Array
) -> None:
    _encode_levels(bits, blocks.starts, blocks.offsets, gradient, residual, payload)


def decode_levels(bits: int, blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
    stream = beyond_caches(out)
    _decode_levels(bits, blocks.starts, blocks.offsets, payload, out, add, stream)


def encode_half(gradient: Array, residual: Array, payload: Array, bfloat: bool) -> None:
    kernel = _encode_bfloat16 if bfloat else _encode_float16
    kernel(gradient, residual, payload.view(np.uint16))


def decode_half(payload: Array, out: Array, add: bool, bfloat: bool) -> None:
    kernel = _decode_bfloat16 if bfloat else _decode_float16
    kernel(payload.view(np.uint16), out, add)


def largest_magnitude(x: Array) -> float:
    return float(_largest_magnitude(x, x.dtype.type(0)))


@compiled
def _encode_1bit(
    starts: Array, offsets: Array, g: Array, r: Array, payload: Array, mean_threshold: bool
) -> None:
    for i in range(len(starts) - 1):
        at, n, byte, raw = block_at(starts, offsets, i)
        if raw:
            encode_raw(g, r, payload, at, byte, n)
            continue
        if mean_threshold:
            mean = simd.plain_sum(g, r, at, n) / F32(n)
            spread = simd.classify_around(r, payload, at, byte + 8, n, mean) / F32(n)
            low, high = mean - spread, mean + spread
        else:
            high, low, ones = simd.classify(g, r, payload, at, byte + 8, n)
            high = high / F32(ones) if ones > 0 else F32(0)
            low = low / F32(n - ones) if ones < n else F32(0)
        simd.set_level(payload, byte, low)
        simd.set_level(payload, byte + 4, high)
        simd.subtract_levels(g, r, payload, at, byte + 8, n, low, high)


@compiled
def _decode_1bit(
    starts: Array, offsets: Array, payload: Array, out: Array, add: bool, stream: bool
) -> None:
    for i in range(len(starts) - 1):
        at, n, byte, raw = block_at(starts, offsets, i)
        if raw:
            decode_raw(payload, out, byte, at, n, add)
            continue
        low, high = simd.get_level(payload, byte), simd.get_level(payload, byte + 4)
        if add:
            simd.unpack_bits_add(payload, out, byte + 8, at, n, low, high)
        elif stream and simd.begins_a_line(out, at):
            simd.unpack_bits_stream(payload, out, byte + 8, at, n, low, high)
        else:
            simd.unpack_bits(payload, out, byte + 8, at, n, low, high)
    if stream:
        simd.finish_stores()


@compiled
def _encode_levels(
    bits: int, starts: Array, offsets: Array, g: Array, r: Array, payload: Array
) -> None:
    for i in range(len(starts) - 1):
        at, n, byte, raw = block_at(starts, offsets, i)
        if raw:
            encode_raw(g, r, payload, at, byte, n)
            continue
        step = simd.largest(g, r, at, n) / F32(2 ** (bits - 1) - 1)
        inverse = F32(1) / step if step >= SMALLEST_STEP else F32(0)
        simd.set_level(payload, byte, step)
        if bits == 4:
            simd.pack_codes_4(g, r, payload, at, byte + 4, n, inverse, step)
        else:
            simd.pack_codes_8(g, r, payload, at, byte + 4, n, inverse, step)


@compiled
def _decode_levels(
    bits: int,
    starts: Array,
    offsets: Array,
    payload: Array,
    out: Array,
    add: bool,
    stream: bool,
) -> None:
    for i in range(len(starts) - 1):
        at, n, byte, raw = block_at(starts, offsets, i)
        if raw:
            decode_raw(payload, out, byte, at, n, add)
            continue
        step = simd.get_level(payload, byte)
        byte += 4
        streams = stream and simd.begins_a_line(out, at)
        if bits == 4:
            if add:
                simd.unpack_codes_4_add(payload, out, byte, at, n, step)
            elif streams:
                simd.unpack_codes_4_stream(payload, out, byte, at, n, step)
            else:
                simd.unpack_codes_4(payload, out, byte, at, n, step)
        else:
            if add:
                simd.unpack_codes_8_add(payload, out, byte, at, n, step)
            elif streams:
                simd.unpack_codes_8_stream(payload, out, byte, at, n, step)
            else:
                simd.unpack_codes_8(payload, out, byte, at, n, step)
    if stream:
        simd.finish_stores()


@compiled
def _encode_float16(g: Array, r: Array, half: Array) -> None:
    simd.encode_float16(g, r, half, len(g))


@compiled
def _encode_bfloat16(g: Array, r: Array, half: Array) -> None:
    simd.encode_bfloat16(g, r, half, len(g))


@compiled
def _decode_float16(half: Array, out: Array, add: bool) -> None:
    if add:
        for i in range(len(out)):
            out[i] += _from_float16(U32(half[i]))
    else:
        for i in range(len(out)):
            out[i] = _from_float16(U32(half[i]))


@compiled
def _decode_bfloat16(half: Array, out: Array, add: bool) -> None:
    if add:
        for i in range(len(out)):
            out[i] += _float(U32(half[i]) << U32(16))
    else:
        for i in range(len(out)):
            out[i] = _float(U32(half[i]) << U32(16))


@compiled
def _from_float16(code: int) -> Any:
    """Shift into place and correct the exponent by a multiplication, also right for denormals."""
    magnitude = _float((code & U32(0x7FFF)) << U32(13)) * F32(2.0**112)
    return _float(_word(magnitude) | ((code & U32(0x8000)) << U32(16)))


@compiled
def _largest_magnitude(x: Array, zero: float) -> Any:
    largest = simd.magnitude_to_word(zero)
    for i in range(len(x)):
        largest = max(largest, simd.magnitude_to_word(x[i]))
    return simd.word_to_magnitude(largest)
