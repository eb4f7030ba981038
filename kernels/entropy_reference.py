"""Uniform quantization with one step for a whole message, and an entropy code, in plain NumPy.

    v = g + r      k = clip(rint(v * (1 / step)), -32767, 32767)      q = k * step      r' = v - q

With few bits most k are 0, and most of the rest are 1 or -1. The code has two parts: the places of
the non-zero values (the live values), as gaps between live values; and their signs and sizes. Gaps
and sizes are integers with a nearly geometric distribution, the case for Rice's code (Rice, "Some
practical universal noiseless coding techniques", JPL 79-22, 1979). If many values are live, masks
of groups of 4 replace the gaps: they are as short, because live values lie side by side in
gradients, and faster.

A message of n values in m = ceil(n / 2048) blocks; all numbers are little-endian:

========================  =========================================================================
uint32                    bytes of the whole message
float32                   the step; with 9 significant bits or fewer every k * step is exact
uint32 [ceil(m / 32)]     bit i % 32 of word i // 32: block i has live values
uint32 [such blocks]      a header for each block with live values
payloads                  of the same blocks, each in whole bytes, bits from the lowest
========================  =========================================================================

The header and payload of a block with z live values:

==================  ===============================================================================
bits 0 to 10        z - 1
bits 11 to 22       bytes of the payload
bits 23 to 26       `low`. 0: the payload begins with one bit for each value: is it live?
                    1 to 11: it begins with the gaps, in planes with `low` low ones.
                    12: it begins with one bit for each group of 4 values: is any live? Then come 4
                    bits for each such group: which are live? Beyond the last value they are 0.
                    15: it is all k as int16, and nothing else; all other bits are 0
bits 27 to 30       `size_low`, 0 to 14. 15: all live k are 1 or -1, and sizes are left out
bit 31              0
live, or gaps       gaps: the number of zeros before each live value, if fewer than 1 in 8 is live
signs               one bit for each live value: is k negative?
sizes               |k| - 1 of each live value, in planes with `size_low` low ones
==================  ===============================================================================

All encoders make the same choices. Gaps are used if fewer than 1 in 8 values is live, groups
otherwise; but a bit for each value is used if that takes no more bits. The number of low planes is
given by `rice_low`, for gaps at least 1. A block is sent as int16 if its code would take as many
bytes or more.

Numbers "in planes" are Rice's code, sorted for processing 64 numbers at a time: plane j < low holds
bit j of each number x. Then come planes t = 0, 1, ... with one bit for each number whose bits were
1 in all planes before t: is x >> low more than t? The last plane has zeros only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F32 = np.float32

BLOCK = 2048  #: values
LARGEST = 32767  #: of |k|
SMALLEST_STEP = 2.0**-126  #: with a float32 reciprocal
GROUP = 4  #: values with a common bit
SPARSE = 8  #: gaps are used if fewer than one in this number of values is live
GROUPS, RAW, NO_SIZES = 12, 15, 15  #: in a header
DAMAGED = -1  #: in place of a length: not a message of any encoder


def rice_low(total: int, count: int) -> int:
    """Return the number of low planes for `count` numbers with this sum.

    This is about log2 of ln 2 times their mean, the best choice for a geometric distribution.
    """
    return (11 * total // (16 * count)).bit_length()


def head_bytes(n: int) -> int:
    """Return the bytes before the headers of a message of n values."""
    return 8 + 4 * -(-n // (32 * BLOCK))


def least_bytes(n: int) -> int:
    """Return the bytes before any payload, for n values with a header for every block."""
    return head_bytes(n) + 4 * -(-n // BLOCK)


def most_bytes(n: int) -> int:
    """Return an upper limit for the bytes of a message of n values."""
    return least_bytes(n) + 2 * n


def checked_step(n: int, payload: Any, step: float) -> Any:
    """Return a step as float32, after checking that n values can be encoded into a payload.

    Raises:
        ValueError: the step or the payload is too small.
    """
    if not step >= SMALLEST_STEP:
        raise ValueError(f"step={step} must be at least 2**-126")
    if len(payload) < least_bytes(n):
        raise ValueError(
            f"a payload of {len(payload)} bytes must have room for the head of a message of {n} "
            f"values, {least_bytes(n)} bytes"
        )
    return F32(step)


def doubled(step: Any) -> Any:
    """Return the next step to try.

    Raises:
        FloatingPointError: there is none.
    """
    if step >= F32(2.0**127):
        raise FloatingPointError("gradients are not finite, or too large for any step")
    return step * F32(2)


def encode_entropy(gradient: Array | None, residual: Array, payload: Array, step: float) -> int:
    """Write a message of v = gradient + residual.

    The step is doubled until the message, with a header for every block, fits into the payload. The
    clipped part of a value stays in the residual.

    Args:
        gradient: float32 [n], or None for zeros.
        residual: float32 [n], replaced by v - q.
        payload: uint8 [least_bytes(n) or more]. Its contents after the message are undefined.
        step: at least 2**-126. Every k * step is exact if the step has at most 24 significant bits
            minus those of the largest |k|.
    Returns:
        The length of the message in bytes.
    Raises:
        ValueError: the payload or the step is too small.
        FloatingPointError: the message fits with no step, since values are not finite. A NaN is
            sent as -LARGEST.
    """
    v = residual.copy() if gradient is None else gradient + residual
    spare = 4 * -(-len(v) // BLOCK)  # of blocks without a header
    used = checked_step(len(v), payload, step)
    while True:
        k = np.rint(v * (F32(1) / used))
        k = np.fmin(np.fmax(k, F32(-LARGEST)), F32(LARGEST))
        q = k * used
        message, headers = _message(k.astype(np.int64), used)
        if len(message) + spare - 4 * headers <= len(payload):
            break
        v = (v - q) + q
        used = doubled(used)
    residual[:] = v - q
    payload[: len(message)] = message
    return len(message)


def decode_entropy(payload: Array, out: Array, add: bool) -> int:
    """Decode a message of `encode_entropy`: ``out = q``, or with `add` ``out += q``.

    Args:
        payload: uint8, which begins with the message.
        out: float32 [n].
        add: True to add.
    Returns:
        The length of the message in bytes; or DAMAGED, after some of `out` has changed.
    """
    n, head = len(out), head_bytes(len(out))
    blocks = -(-n // BLOCK)
    if len(payload) < head:
        return DAMAGED
    total, step = int(payload[:4].view("<u4")[0]), payload[4:8].view("<f4")[0]
    live = np.unpackbits(payload[8:head], bitorder="little")
    at = head + 4 * int(live.sum())
    if live[blocks:].any() or not at <= total <= len(payload) or not 0 < step < np.inf:
        return DAMAGED
    headers = iter(payload[head:at].view("<u4").tolist())
    for i in range(blocks):
        x = out[i * BLOCK : (i + 1) * BLOCK]
        if not live[i]:
            if not add:
                x[:] = 0
            continue
        k, nbytes = _take_block(next(headers), payload[at:total], len(x))
        if k is None:
            return DAMAGED
        q = k.astype(F32) * step
        x[:] = np.where(k != 0, x + q, x) if add else q
        at += nbytes
    return total if at == total else DAMAGED


def _message(k: Array, step: F32) -> tuple[Array, int]:
    """Return a whole message, and its number of headers."""
    blocks = [k[first : first + BLOCK] for first in range(0, len(k), BLOCK)]
    live = np.zeros(8 * (head_bytes(len(k)) - 8), np.uint8)
    live[: len(blocks)] = [block.any() for block in blocks]
    coded = [_block(block) for block in blocks if block.any()]
    head = [np.packbits(live, bitorder="little"), np.array([h for h, _ in coded], "<u4")]
    body = np.concatenate([np.zeros(0, np.uint8), *(payload for _, payload in coded)])
    total = 8 + sum(part.nbytes for part in head) + body.nbytes
    parts = [np.array([total], "<u4"), np.array([step], "<f4"), *head, body]
    return np.concatenate([part.view(np.uint8) for part in parts]), len(coded)


def _block(k: Array) -> tuple[int, Array]:
    """Return the header and the payload of a block."""
    (places,) = np.nonzero(k)
    z, sizes = len(places), np.abs(k[places]) - 1
    if SPARSE * z < len(k):
        gaps = np.diff(places, prepend=-1) - 1
        low = max(rice_low(int(gaps.sum()), z), 1)
        where = _planes(gaps, low)
    else:
        low, where = GROUPS, _groups(k != 0)
    if len(where) >= len(k):
        low, where = 0, k != 0
    size_low, size_bits = NO_SIZES, sizes[:0]
    if sizes.any():
        size_low = min(rice_low(int(sizes.sum()), z), NO_SIZES - 1)
        size_bits = _planes(sizes, size_low)
    payload = np.packbits(np.concatenate([where, k[places] < 0, size_bits]) > 0, bitorder="little")
    if len(payload) >= 2 * len(k):
        return RAW << 23, k.astype("<i2").view(np.uint8)
    return (z - 1) | len(payload) << 11 | low << 23 | size_low << 27, payload


def _groups(live: Array) -> Array:
    by_group = np.pad(live, (0, -len(live) % GROUP)).reshape(-1, GROUP)
    return np.concatenate([by_group.any(1), by_group[by_group.any(1)].ravel()])


def _planes(x: Array, low: int) -> Array:
    planes: list[Array] = [(x >> j) & 1 for j in range(low)]
    x = x >> low
    while len(x):
        planes.append(x > 0)
        x = x[x > 0] - 1
    return np.concatenate(planes)


def _take_block(header: int, payload: Array, n: int) -> tuple[Array | None, int]:
    """Decode the first block of a payload. Return its k and bytes; k is None if damaged."""
    z, nbytes = (header & 2047) + 1, header >> 11 & 4095
    low, size_low = header >> 23 & 15, header >> 27
    if low == RAW:
        if header != RAW << 23 or len(payload) < 2 * n:
            return None, 0
        return payload[: 2 * n].view("<i2").astype(np.int64), 2 * n
    if header >> 31 or z > n or low > GROUPS or nbytes > len(payload):
        return None, 0
    bits = _Bits(payload[:nbytes])
    if low == GROUPS:
        places = np.flatnonzero(bits.groups(n))
    else:
        places = np.cumsum(bits.numbers(z, low) + 1) - 1 if low else np.flatnonzero(bits.take(n))
    signs = bits.take(z)
    sizes = bits.numbers(z, size_low) + 1 if size_low != NO_SIZES else np.ones(z, np.int64)
    if bits.ended or len(places) != z or places[-1] >= n or sizes.max() > LARGEST:
        return None, 0
    k = np.zeros(n, np.int64)
    k[places] = np.where(signs, -sizes, sizes)
    return k, nbytes


class _Bits:
    """The bits of a payload, read part by part. Beyond its end come zeros, and `ended` is True."""

    def __init__(self, payload: Array) -> None:
        self._bits, self._at = np.unpackbits(payload, bitorder="little").astype(np.int64), 0
        self.ended = False

    def take(self, count: int) -> Array:
        part = self._bits[self._at : self._at + count]
        self._at += count
        self.ended |= len(part) < count
        return np.pad(part, (0, count - len(part)))

    def groups(self, count: int) -> Array:
        live = np.repeat(self.take(-(-count // GROUP)), GROUP)
        live[live > 0] = self.take(int(live.sum()))
        return live

    def numbers(self, count: int, low: int) -> Array:
        x = sum((self.take(count) << j for j in range(low)), np.zeros(count, np.int64))
        alive = np.arange(count)
        while len(alive):
            alive = alive[self.take(len(alive)) > 0]
            x[alive] += 1 << low
        return x
