"""The options of everything that is sent with few bits, and what such a message can hold."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from ..errors import SMALLER_RATE, NotFinite
from ..kernels import body
from ..options import Choice, Options, Whole, option, options
from .codec import (
    CODE,
    Array,
    Codec,
    auto_bits,
    codec_for,
    registered_bits,
    registered_codes,
    users_of,
)

LARGEST = float(np.float32(1e30))
"""With few bits. Beyond it the sums of a block could overflow: taken for divergence."""

AUTO = "auto"  #: what is measured before training, or follows from the hosts


class GradientBits(Choice):
    """Bits a value for which a codec is registered."""

    @property
    def values(self) -> Sequence[Any]:
        return registered_bits()


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
        "what 1 bit a value says: largest, of every 8 values which is the largest, its sign and "
        "magnitude; sign, of every value on which side of 0 it is (Seide et al. 2014), which "
        "learns with plain SGD only",
    )
    block_size: int = option(
        1024,
        Whole(1, 2**20),
        "values that share quantization levels (8 bits and less); with any bits buckets, and what "
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
        possible = bits | set(auto_bits()) if AUTO in bits else bits
        for name in ("code", "threshold", "half_format"):
            if name == "code":  # of which "auto" knows one only
                used = AUTO not in bits and not bits.isdisjoint(users_of(name))
            else:
                used = not possible.isdisjoint(users_of(name, self.code))
            needs = " or ".join(
                f"gradient_bits={number}" + (f" and code={code!r}" if code else "")
                for number, code in users_of(name).items()
            )
            self.require_use(name, used, needs)
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
