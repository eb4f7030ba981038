"""The kernels in plain NumPy: the specification, and the reference of the tests.

The code is written for reading, not for speed. The other bodies produce the same bytes: every sum
runs in the order of `lane_sum`, every operation is one IEEE float32 operation, and nothing is
contracted. `blocks` holds the wire format.

Encoding always carries error feedback: with v = g + r, a value is sent as q, and its error stays in
the residual, r' = v - q, so that g + r == q + r' (Seide et al., Interspeech 2014, §3.2).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .blocks import GROUP, Blocks
from .entropy_reference import decode_entropy, encode_entropy
from .top_k_reference import decode_top_k, encode_top_k

__all__ = ["decode_entropy", "decode_top_k", "encode_entropy", "encode_top_k"]

Array = npt.NDArray[Any]
F32 = np.float32

ROUNDING = F32(12582912.0)
"""1.5 * 2**23: adding it rounds a float32 below 2**22 to the nearest even integer."""

SMALLEST_STEP = F32(1e-37)
"""A smaller step has no float32 reciprocal. Its block is sent as zeros and stays as residual."""

LARGEST_HALF = F32(65504.0)

MOMENT_GROUP = 64
"""Consecutive values with a common correction of Adam's second moment: see `optimizers.Adam`.
A 64-bit word holds their signs."""


def lane_sum(values: Array) -> F32:
    """Sum a block in 32 lanes, then the lanes by halves: the order of a warp and of SIMD code."""
    lanes = np.zeros(GROUP, F32)
    for group in range(0, len(values), GROUP):
        part = values[group : group + GROUP]
        lanes[: len(part)] += part
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half:]
    return F32(lanes[0])


def encode_1bit(
    blocks: Blocks, gradient: Array, residual: Array, payload: Array, mean_threshold: bool
) -> None:
    """Send each value as a bit that selects one of its block's two levels.

        bit = v >= 0,  high = mean of v where bit,  low = mean of v elsewhere

    or, with `mean_threshold`, bit = v >= mean(v) and the levels mean(v) ± mean|v - mean(v)|.

    Args:
        gradient, residual: float32 [n]; the residual is replaced by v - q.
        payload: uint8 [bytes of `blocks`], written.
    """
    for g, r, out in blocks.views(gradient, residual, payload):
        v = g + r
        if out.nbytes == 4 * v.size:
            out.view(F32)[:], r[:] = v, 0
            continue
        if mean_threshold:
            mean = lane_sum(v) / F32(v.size)
            spread = lane_sum(np.abs(v - mean)) / F32(v.size)
            bit = v >= mean
            low, high = mean - spread, mean + spread
        else:
            bit = v >= 0
            low, high = _class_mean(v, ~bit), _class_mean(v, bit)
        out[:8].view(F32)[:] = low, high
        out[8:] = np.packbits(_whole_groups(bit), bitorder="little")
        r[:] = v - np.where(bit, high, low)


def decode_1bit(blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
    """Decode a payload of `encode_1bit`: ``out = q``, or with `add` ``out += q``."""
    for coded, x in blocks.views(payload, out):
        if coded.nbytes == 4 * x.size:
            q = coded.view(F32)
        else:
            low, high = coded[:8].view(F32)
            bit = np.unpackbits(coded[8:], count=x.size, bitorder="little")
            q = np.where(bit, high, low)
        x[:] = x + q if add else q


def encode_levels(
    bits: int, blocks: Blocks, gradient: Array, residual: Array, payload: Array
) -> None:
    """Send each value as the nearest of 2**bits - 1 uniform levels around an exact zero.

        step = max|v| / (2**(bits - 1) - 1),  code = round(v / step),  q = code * step

    No value lies beyond the last level. So |r'| <= step / 2, and gradients of magnitudes <= G never
    build up a residual beyond G / (2**bits - 3). Codes need no clipping either: after three
    roundings |v * inverse| is still below the largest code + 1/2, for all finite v.

    Args:
        gradient, residual: float32 [n]; the residual is replaced by v - q.
        payload: uint8 [bytes of `blocks`], written.
    """
    largest = F32(2 ** (bits - 1) - 1)
    for g, r, out in blocks.views(gradient, residual, payload):
        v = g + r
        if out.nbytes == 4 * v.size:
            out.view(F32)[:], r[:] = v, 0
            continue
        step = np.abs(v).max() / largest
        inverse = F32(1) / step if step >= SMALLEST_STEP else F32(0)
        code = (v * inverse + ROUNDING) - ROUNDING
        out[:4].view(F32)[:] = step
        out[4:] = _pack(code.astype(np.int8), bits)
        r[:] = v - code * step


def decode_levels(bits: int, blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
    """Decode a payload of `encode_levels`: ``out = q``, or with `add` ``out += q``."""
    for coded, x in blocks.views(payload, out):
        if coded.nbytes == 4 * x.size:
            q = coded.view(F32)
        else:
            q = _unpack(coded[4:], bits)[: x.size].astype(F32) * coded[:4].view(F32)[0]
        x[:] = x + q if add else q


def encode_half(gradient: Array, residual: Array, payload: Array, bfloat: bool) -> None:
    """Send each value as a float16, clipped to ±65504, or a bfloat16, rounded to nearest even.

    Args:
        gradient, residual: float32 [n]; the residual is replaced by v - q.
        payload: uint8 [2n], written.
        bfloat: True for bfloat16.
    """
    v = gradient + residual
    if bfloat:
        word = v.view(np.uint32)
        half = ((word + (0x7FFF + ((word >> 16) & 1))) >> 16).astype(np.uint16)
    else:
        half = np.clip(v, -LARGEST_HALF, LARGEST_HALF).astype(np.float16).view(np.uint16)
    payload.view(np.uint16)[:] = half
    residual[:] = v - _from_half(half, bfloat)


def decode_half(payload: Array, out: Array, add: bool, bfloat: bool) -> None:
    """Decode a payload of `encode_half`: ``out = q``, or with `add` ``out += q``."""
    q = _from_half(payload.view(np.uint16), bfloat)
    out[:] = out + q if add else q


def largest_magnitude(x: Array) -> float:
    """Return max |x|, NaN if any value is NaN, and 0 for an empty array."""
    return float(np.abs(x).max(initial=0))


def sgd_step(x: Array, gradient: Array, lr: float, out: Array | None = None) -> None:
    """Set x -= lr * gradient, in place; or write the new x to `out` and leave x unchanged."""
    _new(x, out)[:] = x - x.dtype.type(lr) * gradient


def momentum_step(
    x: Array,
    m: Array,
    gradient: Array,
    lr: float,
    momentum: float,
    gain: float,
    nesterov: bool,
    out: Array | None = None,
) -> None:
    """Set m = momentum * m + gain * gradient;  x -= lr * m, in place or with the new x in `out`.

    Nesterov: x -= lr * (momentum * m + gain * gradient), with the new m.
    """
    real = x.dtype.type
    push = real(gain) * gradient
    m[:] = real(momentum) * m + push
    _new(x, out)[:] = x - real(lr) * (real(momentum) * m + push if nesterov else m)


def adam_step(
    x: Array,
    m: Array,
    v: Array,
    gradient: Array,
    scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
    out: Array | None = None,
) -> None:
    """Take one Adam(W) step, in place, with bias-corrected `lr` and `epsilon` given by the caller.

    g = scale * gradient
    m += (1 - beta1) * (g - m);   v += (1 - beta2) * (g * g - v)
    x -= lr * m / (sqrt(v) + epsilon) + decay * x,   or the new x in `out`
    """
    real = x.dtype.type
    g = real(scale) * gradient
    m += real(1 - beta1) * (g - m)
    v += real(1 - beta2) * (g * g - v)
    _new(x, out)[:] = x - (real(lr) * m / (np.sqrt(v) + real(epsilon)) + real(decay) * x)


def adam_step_of_quantized(
    x: Array,
    m: Array,
    v: Array,
    gradient: Array,
    scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
    slopes: Array,
    shifts: Array,
    first: int,
    least: float,
    out: Array | None = None,
) -> None:
    """Take an `adam_step` on a quantized gradient, with a correction for each group.

    root = max(sqrt(slope * v + shift), least * |m|)
    x -= lr * m / (root + epsilon) + decay * x,   or the new x in `out`

    Args:
        slopes, shifts: for each group of the whole vector.
        first: the index of the first value here in the whole vector.
        least: the smallest root, as a multiple of |m|.
    """
    real = x.dtype.type
    g = real(scale) * gradient
    m += real(1 - beta1) * (g - m)
    v += real(1 - beta2) * (g * g - v)
    groups = np.arange(first, first + len(x)) // MOMENT_GROUP
    root = np.sqrt(slopes[groups] * v + shifts[groups])
    root = np.maximum(root, real(least) * np.abs(m))
    _new(x, out)[:] = x - (real(lr) * m / (root + real(epsilon)) + real(decay) * x)


def add_to_groups(values: Array, first: int, step: int, sums: Array) -> None:
    """Add up values by groups of `MOMENT_GROUP`, with random signs or without.

    sums[group] += sum of sign * value, value by value

    Args:
        values: consecutive values of the whole vector.
        first: the index of the first of these in the whole vector.
        step: selects the signs, from 1 to below 2**31; 0: all are +.
        sums: for each group of the whole vector; changed.
    """
    for index, value in enumerate(values, first):
        group, place = divmod(index, MOMENT_GROUP)
        negative = step and group_signs(step, group) >> place & 1
        sums[group] += -value if negative else value


def group_signs(step: int, group: int) -> int:
    """Return 64 random bits for a group in a step.

    The bits are computed by the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    bits = step << 32 | group
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & (2**64 - 1)
    return bits ^ bits >> 31


def adagrad_step(
    x: Array,
    s: Array,
    gradient: Array,
    scale: float,
    lr: float,
    epsilon: float,
    out: Array | None = None,
) -> None:
    """Set g = scale * gradient;  s += g * g;  x -= lr * g / (sqrt(s) + epsilon).

    In place, or with the new x in `out`.
    """
    real = x.dtype.type
    g = real(scale) * gradient
    s += g * g
    _new(x, out)[:] = x - real(lr) * g / (np.sqrt(s) + real(epsilon))


def compensate_delay(gradient: Array, x: Array, backup: Array, factor: float) -> None:
    """Set gradient += factor * gradient * gradient * (x - backup), in place.

    This is a first-order estimate of the gradient at x from the gradient at `backup`, the worker's
    parameters.

    Source: Zheng et al., ICML 2017, eq. 10.
    """
    gradient += gradient.dtype.type(factor) * gradient * gradient * (x - backup)


def low_rank_product(p: Array, q: Array, out: Array, rank: int, subtract: bool) -> None:
    """Set out = P Q^T, or out -= P Q^T: column by column of P and Q, value by value.

    A library's matrix product would round differently on another machine, or with another number of
    threads.

    Args:
        p, q, out: [rank * a], [rank * b] and [a * b]: P and Q column by column, out row by row.
        rank: the number of columns of P and Q.
        subtract: True for out -= P Q^T.
    """
    matrix = out.reshape(len(p) // rank, len(q) // rank)
    if not subtract:
        matrix[:] = 0
    for p_k, q_k in zip(p.reshape(rank, -1), q.reshape(rank, -1), strict=True):
        matrix[:] = matrix - np.outer(p_k, q_k) if subtract else matrix + np.outer(p_k, q_k)


def weighted_difference(x: Array, start: Array, weight: float, out: Array | None = None) -> float:
    """Set x = weight * (start - x), in place or in `out`. Return max |start - x|, or NaN."""
    difference = start - x
    _new(x, out)[:] = x.dtype.type(weight) * difference
    return largest_magnitude(difference)


def averaging_step(x: Array, gradient: Array) -> None:
    """Set x -= gradient;  gradient = x: both are the new x."""
    x -= gradient
    gradient[:] = x


def outer_momentum_step(
    x: Array,
    m: Array,
    gradient: Array,
    lr: float,
    momentum: float,
    gain: float,
    nesterov: bool,
) -> None:
    """Take a `momentum_step` in place, then set gradient = x: both are the new x."""
    momentum_step(x, m, gradient, lr, momentum, gain, nesterov)
    gradient[:] = x


def mix(x: Array, common: Array, weight: float) -> None:
    """Set x = weight * (x - common) + common, in place."""
    x[:] = x.dtype.type(weight) * (x - common) + common


def _new(x: Array, out: Array | None) -> Array:
    return x if out is None else out


def _class_mean(v: Array, members: Array) -> F32:
    count = np.count_nonzero(members)
    return lane_sum(np.where(members, v, F32(0))) / F32(count) if count else F32(0)


def _whole_groups(values: Array) -> Array:
    return np.pad(values, (0, -len(values) % GROUP))


def _pack(codes: Array, bits: int) -> Array:
    fields = _whole_groups(codes).view(np.uint8).reshape(-1, 8 // bits, GROUP * bits // 8)
    packed = np.zeros((len(fields), GROUP * bits // 8), np.uint8)
    for i in range(8 // bits):
        packed |= (fields[:, i] & (2**bits - 1)) << (i * bits)
    return packed.ravel()


def _unpack(packed: Array, bits: int) -> Array:
    groups = packed.reshape(-1, 1, GROUP * bits // 8)
    # Shift each field to the top, then down with its sign.
    up = np.arange(8 - bits, -1, -bits, dtype=np.uint8).reshape(1, -1, 1)
    return ((groups << up).view(np.int8) >> (8 - bits)).ravel()


def _from_half(half: Array, bfloat: bool) -> Array:
    if bfloat:
        return (half.astype(np.uint32) << 16).view(F32)
    return half.view(np.float16).astype(F32)
