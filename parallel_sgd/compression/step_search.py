"""A search for the step size that encodes a vector with a given number of bits per value.

The length of a message falls as the step grows: the logarithms are nearly proportional. So the
secant rule finds the logarithm of the step, using the true lengths of messages of a sample: first
of an eighth of the sample, then of the whole sample. No state is kept between messages: the step
depends on the vector alone, and needs no agreement between ranks.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..kernels import array_module, body, empty_like, on_host
from ..kernels.entropy_reference import BLOCK, LARGEST, SMALLEST_STEP, most_bytes
from .codec import padded

Array = Any  #: a NumPy or CuPy array

LEAST_SAMPLED = 64  #: blocks: the least size of a sample
SAMPLE_ONE_IN = 32  #: of a long vector, one in this number of blocks is sampled
MOST_SAMPLED = 256  #: blocks: the largest size of a sample
MOST_KEPT = 1 << 20  #: values for which memory is kept: more than a sample has
COARSE = 8  #: one in this number of blocks of the sample is encoded first
TOLERANCE, COARSE_TOLERANCE = 0.03, 0.15  #: relative tolerance of the bits, on a sample
TRIES = 16  #: the most encodes of the whole sample, and of its eighth
MOST_EQUAL = 2  #: the most tries with an unchanged length, although the step changed
LEAST_BITS = 512  #: of a vector: with fewer bits, the values of a short vector would never be sent
LARGEST_EXPONENT = 126.0  #: of a step
SLOPE = 0.7  #: initial guess of -d log(length) / d log(step)
LEAST_SLOPE, MOST_SLOPE = 0.3, 5.0  #: limits of measured slopes
MOST_CHANGE = 2.0  #: the largest change of the logarithm of the step at a time


def message_room(values: int) -> int:
    """Return the bytes in which any message of this number of values fits."""
    return padded(most_bytes(values))


def target_bits(bits: float, values: int) -> float:
    """Return the target bits per value for a vector with this number of values. Local."""
    return max(bits, LEAST_BITS / values)


class Step(NamedTuple):
    """A step size, and the bits per value of a message with this step."""

    size: float
    bits: float


def find_step(v: Array, bits: float, values: int) -> Step:
    """Find the step size for messages of `bits` bits per value.

    Args:
        v: float32, finite: all values of a vector, or a sample.
        bits: the target bits per value.
        values: the number of values of the vector.
    Raises:
        UserError: a value is not finite. (Callers check gradients beforehand.)

    The step has few enough significant bits to make its multiples exact, up to 8 times the largest
    value of the sample; but no fewer than 8, with which all multiples are exact.

    Local. Cost: mostly two encodes of `v`, and some of an eighth of it; at worst `TRIES` of each.
    """
    largest = body(v).largest_magnitude(v) if v.size else 0.0
    if not largest:
        return Step(1.0, 0.0)
    if not math.isfinite(largest):
        raise UserError(f"values to be sent must be finite: their largest magnitude is {largest}")
    target = target_bits(bits, values)
    blocks = v.size // BLOCK
    search = _Search(largest, target, *_scratch.like(v))
    if blocks >= 2 * COARSE:
        search(
            v[: blocks * BLOCK].reshape(-1, BLOCK)[COARSE // 2 :: COARSE].ravel(), COARSE_TOLERANCE
        )
    return search(v, TOLERANCE)


def sample_of_sums(pairs: Sequence[tuple[Array | None, Array]], *, of_all: bool = False) -> Array:
    """Return some blocks of vectors v = a + b, evenly spread over all of them, as one vector.

    Args:
        pairs: (a, b) float32 of the same length; a may be None for zeros.
        of_all: True for all values.

    The choice of blocks changes with the values: a constant choice would always err in the same
    direction. Local.
    """
    whole = [b.size // BLOCK for _, b in pairs]
    stride = 1 if of_all else _stride(sum(max(count, 1) for count in whole))
    xp = array_module(pairs[0][1])
    first = _hash_of_values(pairs) % stride if stride > 1 else 0
    parts = []
    for (a, b), count in zip(pairs, whole, strict=True):
        if stride == 1:
            parts.append(b if a is None else a + b)
            continue
        if count == 0:
            if first == 0:
                parts.append(b if a is None else a + b)
            first = (first - 1) % stride
            continue
        rows = slice(first, None, stride)
        some = b[: count * BLOCK].reshape(-1, BLOCK)[rows]
        if a is not None:
            some = a[: count * BLOCK].reshape(-1, BLOCK)[rows] + some
        parts.append(some.ravel())
        first = (first - count) % stride
    return parts[0] if len(parts) == 1 else xp.concatenate(parts)


def sampled_values(values: int) -> int:
    """Return about how many values a sample of so many has. Local."""
    return values // _stride(max(values // BLOCK, 1))


def _stride(blocks: int) -> int:
    """Return the stride of the blocks of a sample."""
    return max(1, blocks // min(max(blocks // SAMPLE_ONE_IN, LEAST_SAMPLED), MOST_SAMPLED))


def _hash_of_values(pairs: Sequence[tuple[Array | None, Array]]) -> int:
    """Return a hash of some values, which changes with the values."""
    number = 0
    for pair in pairs:
        for x in pair:
            if x is not None:
                some = on_host(x[:: max(1, x.size // LEAST_SAMPLED)])
                number = zlib.crc32(some.tobytes(), number)
    return number


def _choose_between(above: Step | None, below: Step | None, target: float, v: Array) -> Step:
    """Choose between two steps between which the length jumps, since many values are equal.

    The step with more bits is chosen just often enough for the mean over many vectors to be the
    target.
    """
    if above is None or below is None:
        step = above or below
        assert step is not None
        return step
    share = (target - below.bits) / (above.bits - below.bits)
    return above if _hash_of_values([(None, v)]) % 1000 < 1000 * share else below


class _Scratch(threading.local):
    """A thread's memory for searches on a CPU.

    It is kept, since the first write to each page of new memory takes longer than an encode.
    """

    def __init__(self) -> None:
        self._copy, self._room = np.empty(0, np.float32), np.empty(0, np.uint8)

    def like(self, v: Array) -> tuple[Array, Array]:
        """Return memory for a copy of `v`, and for any message of its values."""
        room = message_room(v.size)
        if array_module(v) is not np or v.size > MOST_KEPT:
            return empty_like(v, v.size), empty_like(v, room, np.uint8)
        if self._copy.size < v.size:
            self._copy = empty_like(v, v.size, np.float32)
            self._room = empty_like(v, room, np.uint8)
        return self._copy[: v.size], self._room[:room]


_scratch = _Scratch()


class _Search:
    """Searches for a step size, on one vector after another.

    Each search starts from the step and slope of the previous search.

    Args:
        largest: the largest magnitude of a value.
        target: bits per value.
        copy, room: memory for the values, and for a message.
    """

    def __init__(self, largest: float, target: float, copy: Array, room: Array) -> None:
        self._largest, self._target, self._copy, self._room = largest, target, copy, room
        least, most = math.log2(max(largest / LARGEST, SMALLEST_STEP)), math.log2(largest) + 2
        self._least, self._most = least, max(least, min(most, LARGEST_EXPONENT))
        self._guess = min(max(math.log2(largest) - 2 * target, self._least), self._most)
        self._slope = SLOPE

    def __call__(self, v: Array, within: float) -> Step:
        # The bracket: logarithms of steps with too many bits, and with too few.
        too_many, too_few, x = self._least, self._most, self._guess
        above, below, last = None, None, None
        tried: set[float] = set()
        equal = 0  # tries with the bits of the best steps so far: the length jumps in the bracket
        for _ in range(TRIES):
            size = self._rounded(2.0**x)
            if size in tried or equal == MOST_EQUAL:
                break
            tried.add(size)
            step = Step(size, self._bits_of(v, size))
            excess = math.log2(step.bits / self._target)
            self._guess = x
            if abs(excess) < math.log2(1 + within):
                return step
            if above and below:
                equal += step.bits in (above.bits, below.bits)
            if excess > 0:
                too_many = x
                if above is None or step.bits < above.bits:
                    above = step
            else:
                too_few = x
                if below is None or step.bits > below.bits:
                    below = step
            if last is not None:
                slope = (last[1] - excess) / (x - last[0])
                self._slope = min(max(slope, LEAST_SLOPE), MOST_SLOPE)
            last = x, excess
            x += min(max(excess / self._slope, -MOST_CHANGE), MOST_CHANGE)
            if x <= too_many and above is None:
                x = self._least  # even the smallest step may not need this number of bits
            elif not too_many < x < too_few:
                x = (too_many + too_few) / 2
        step = _choose_between(above, below, self._target, v)
        self._guess = math.log2((above or step).size)
        return step

    def _bits_of(self, v: Array, step: float) -> float:
        """Return the bits per value of a message with this step."""
        copy = self._copy[: v.size]
        copy[...] = v
        length: int = body(v).encode_entropy(None, copy, self._room, step)
        return 8 * length / int(v.size)

    def _rounded(self, step: float) -> float:
        multiples = int(8 * self._largest / step) + 1
        bits = min(max(24 - multiples.bit_length(), 8), 16)
        word = int(np.float32(step).view(np.uint32))
        unit = 1 << (24 - bits)
        return float(np.uint32((word + unit // 2) // unit * unit).view(np.float32))
