"""The options of everything that is sent with few bits, and what such a message can hold."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any, cast

import numpy as np

from ..errors import SMALLER_RATE, NotFinite
from ..kernels import body
from ..options import Choice, Options, Whole, option, options
from .codec import (
    CODE,
    Array,
    Codec,
    auto_bits,
    bits_with,
    checked_bits,
    codec_for,
    has_code,
    registered_codes,
    users_of,
)

LARGEST = float(np.float32(1e30))
"""With few bits. Beyond it the sums of a block could overflow: taken for divergence."""

AUTO = "auto"  #: what is measured before training, or follows from the hosts


class GradientBits:
    """Bits a value for which there is a codec."""

    metavar = "N"
    expected = "a number of bits"

    def __call__(self, name: str, value: Any) -> float:
        return checked_bits(name, value)

    def read(self, text: str) -> float | str:
        """The number; else the text, of which the check then says what it must be."""
        try:
            return int(text) if text.isdigit() else float(text)
        except ValueError:
            return text


class Code(Choice):
    """The codecs among which the same bits leave a choice."""

    @property
    def values(self) -> Sequence[Any]:
        return registered_codes()


@options
class CompressionOptions(Options):
    """How values become bits. What the bits make no use of is refused."""

    code: str = option(
        CODE,
        Code(),
        "how values become bits: entropy, multiples of one step for all values in an entropy code, "
        "for 0.05 to 8 bits; levels, evenly spaced levels for each block, for 4 and 8 bits; sign, "
        "for 1 bit (Seide et al. 2014), which learns with plain SGD only; auto: levels for 4 and 8 "
        "bits, and entropy for all others below 16",
    )
    block_size: int = option(
        1024,
        Whole(1, 2**20),
        "values that share quantization levels (levels and sign); with any bits buckets, and what "
        "a rank adds up of them, begin and end with a block",
    )
    threshold: str = option(
        "zero", Choice("zero", "mean"), "at which of the two signs split a block"
    )
    half_format: str = option(
        "float16", Choice("float16", "bfloat16"), "which format 16 bits are in"
    )
    error_feedback: bool = option(
        True,
        Choice(True, False),
        "whether what a message loses is sent with the next one; without it few bits do not "
        "converge: only to see what it is for",
    )

    def codec(self, bits: float) -> Codec:
        """The codec that these options mean at so many bits."""
        return codec_for(
            bits,
            code=self.code,
            block_size=self.block_size,
            threshold=self.threshold,
            half_format=self.half_format,
        )

    def require_use_with(self, bits: Set[float | str]) -> None:
        """See that each option that was given has an effect with some of these bits.

        Raises:
            UserError: it has none.
        """
        possible = bits | set(auto_bits() if AUTO in bits else ())
        codecs = {type(self.codec(cast(float, one))) for one in possible - {AUTO}}
        for name in ("threshold", "half_format"):
            users = users_of(name)
            self.require_use(name, not codecs.isdisjoint(users), " or ".join(users.values()))
        numbers = [one for one in bits if not isinstance(one, str)]
        has = self.code == CODE or any(has_code(number, self.code) for number in numbers)
        self.require_use("code", has, bits_with(self.code))
        few = any(isinstance(number, str) or number < 32 for number in bits)
        self.require_use("error_feedback", few, "gradient_bits of less than 32")


def problem_with(vector: Array, bits: float = 32, name: str = "gradient") -> str | None:
    """Why a vector cannot be exchanged with so many bits; None where it can.

    Full precision takes all that is finite: a sum that overflows shows in the next gradient.

    Local. Cost: reads the vector once.
    """
    return problem_with_largest(body(vector).largest_magnitude(vector), bits, name)


def problem_with_largest(largest: float, bits: float, name: str) -> str | None:
    """`problem_with` a vector whose largest magnitude is known. Local."""
    if not math.isfinite(largest):
        return NotFinite(
            f"the {name} is not finite: its largest magnitude is {largest}; {SMALLER_RATE}"
        )
    if bits < 32 and largest > LARGEST:
        return (
            f"the {name} is too large: its largest magnitude is {largest:.9g}, and at most "
            f"{LARGEST:g} can be exchanged with gradient_bits={bits}; {SMALLER_RATE}"
        )
    return None
