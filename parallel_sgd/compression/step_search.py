"""The step of quantization with which a vector takes so many bits a value.

The length of a message falls as its step grows, nearly in proportion. So the logarithm of the step
is found by the secant rule, on the true lengths of messages of a sample: first of an eighth of the
sample, then of all of it. Nothing is kept from one message to the next: the step depends on
the vector alone, and ranks agree on nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..kernels import array_module, body, empty_like, on_host
from ..kernels.entropy_reference import BLOCK, LARGEST, SMALLEST_STEP, most_bytes

Array = Any  #: a NumPy or CuPy array

SAMPLED = 64  #: blocks, at least, of which a sample consists
ONE_IN = 32  #: blocks of a long vector is sampled
MOST_SAMPLED = 256
COARSE = 8  #: one in so many blocks of the sample is looked at first
WITHIN, ROUGHLY_WITHIN = 0.03, 0.15  #: of the bits that are asked for, on a sample
TRIES = 16  #: at most, of each kind
MOST_EQUAL = 2  #: tries in which the length does not change, while the step does
LEAST_BITS = 512  #: of a vector: with fewer, what few values there are would never be sent
LARGEST_EXPONENT = 126.0  #: of a step
SLOPE = 0.7  #: as the logarithm of the step grows by 1, that of the length falls by about so much
FLATTEST, STEEPEST = 0.3, 5.0  #: slopes that are believed
FARTHEST = 2.0  #: by which the logarithm of the step is changed at a time


def message_room(values: int) -> int:
    """Bytes in which any message of so many values has room."""
    return -(-most_bytes(values) // 4) * 4


def target_bits(bits: float, values: int) -> float:
    """Bits a value of a vector of so many values that is to have `bits`. Local."""
    return max(bits, LEAST_BITS / values)


class Step(NamedTuple):
    """A step of quantization, and the bits a value that it gives to the values it was found for."""

    size: float
    bits: float


def find_step(v: Array, bits: float, values: int) -> Step:
    """The step with which messages should have `bits` bits a value.

    Args:
        v: float32, finite: all values of a vector, or a sample of them.
        values: of the vector.
    Raises:
        UserError: a value is not finite. (Whoever gives a gradient has it looked at before.)

    The step has so few significant bits that its multiples are exact, up to 8 times the largest
    value of the sample; and no fewer than 8, with which all are.

    Local. Cost: mostly two encodes of `v`, and some of an eighth of it; at worst `TRIES` of each.
    """
    largest = body(v).largest_magnitude(v) if v.size else 0.0
    if not largest:
        return Step(1.0, 0.0)
    if not math.isfinite(largest):
        raise UserError(f"values to be sent must be finite: their largest magnitude is {largest}")
    target = target_bits(bits, values)
    blocks = v.size // BLOCK
    search = _Search(largest, target, empty_like(v, message_room(v.size), np.uint8))
    if blocks >= 2 * COARSE:
        search(
            v[: blocks * BLOCK].reshape(-1, BLOCK)[COARSE // 2 :: COARSE].ravel(), ROUGHLY_WITHIN
        )
    return search(v, WITHIN)


def sample_of_sums(pairs: Sequence[tuple[Array | None, Array]], *, of_all: bool = False) -> Array:
    """Some blocks of vectors v = a + b, evenly spread over all of them, as one vector.

    Args:
        pairs: (a, b) float32 of the same length; a may be None for zeros.
        of_all: all values.

    Which blocks these are changes with the values: always the same ones would always err in the
    same direction. Local.
    """
    whole = [b.size // BLOCK for _, b in pairs]
    total = sum(max(count, 1) for count in whole)
    stride = max(1, total // min(max(total // ONE_IN, SAMPLED), MOST_SAMPLED))
    stride = 1 if of_all else stride
    xp = array_module(pairs[0][1])
    first = _any_number(pairs) % stride if stride > 1 else 0
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


def _any_number(pairs: Sequence[tuple[Array | None, Array]]) -> int:
    """Of the bits of some values: another one for other values."""
    number = 0
    for pair in pairs:
        for x in pair:
            if x is not None:
                some = on_host(x[:: max(1, x.size // SAMPLED)])
                number = zlib.crc32(some.tobytes(), number)
    return number


def _either(above: Step | None, below: Step | None, target: float, v: Array) -> Step:
    """One of two steps between which the length jumps, since many values are alike: that with more
    bits so often that the mean over many vectors is the target."""
    if above is None or below is None:
        step = above or below
        assert step is not None
        return step
    share = (target - below.bits) / (above.bits - below.bits)
    return above if _any_number([(None, v)]) % 1000 < 1000 * share else below


class _Search:
    """Searches for a step, on one vector after another, each time from the last one's on, and with
    its slope.

    Args:
        largest: magnitude of a value.
        target: bits a value.
        room: for a message.
    """

    def __init__(self, largest: float, target: float, room: Array) -> None:
        self._largest, self._target, self._room = largest, target, room
        least, most = math.log2(max(largest / LARGEST, SMALLEST_STEP)), math.log2(largest) + 2
        self._least, self._most = least, max(least, min(most, LARGEST_EXPONENT))
        self._guess = min(max(math.log2(largest) - 2 * target, self._least), self._most)
        self._slope = SLOPE

    def __call__(self, v: Array, within: float) -> Step:
        # The bracket: logarithms of steps with which there are too many bits, and too few.
        too_many, too_few, x = self._least, self._most, self._guess
        above, below, last = None, None, None
        tried: set[float] = set()
        equal = 0  # tries that had the bits of the best ones: the length jumps in the bracket
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
                self._slope = min(max(slope, FLATTEST), STEEPEST)
            last = x, excess
            x += min(max(excess / self._slope, -FARTHEST), FARTHEST)
            if x <= too_many and above is None:
                x = self._least  # so many bits may not be needed at all
            elif not too_many < x < too_few:
                x = (too_many + too_few) / 2
        step = _either(above, below, self._target, v)
        self._guess = math.log2((above or step).size)
        return step

    def _bits_of(self, v: Array, step: float) -> float:
        """Bits a value of a message with this step."""
        length: int = body(v).encode_entropy(None, v.copy(), self._room, step)
        return 8 * length / int(v.size)

    def _rounded(self, step: float) -> float:
        multiples = int(8 * self._largest / step) + 1
        bits = min(max(24 - multiples.bit_length(), 8), 16)
        word = int(np.float32(step).view(np.uint32))
        unit = 1 << (24 - bits)
        return float(np.uint32((word + unit // 2) // unit * unit).view(np.float32))
