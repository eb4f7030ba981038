"""The options of everything that is sent with few bits, and what such a message can hold."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from ..kernels import body
from ..options import Choice, Options, Whole, option, options
from .codec import Array, Codec, bits_with, codec_for, registered_bits

LARGEST = float(np.float32(1e30))
"""With few bits. Beyond it the sums of a block could overflow: taken for divergence."""

AUTO = "auto"  #: what is measured before training, or follows from the hosts


class GradientBits(Choice):
    """Bits a value for which a codec is registered."""

    @property
    def values(self) -> Sequence[Any]:
        return registered_bits()


@options
class CompressionOptions(Options):
    """How values become bits. What the bits make no use of is refused."""

    block_size: int = option(
        1024,
        Whole(1, 2**20),
        "values that share quantization levels (1 to 8 bits); with any bits buckets, and what a "
        "rank adds up of them, begin and end with a block",
    )
    threshold: str = option(
        "zero", Choice("zero", "mean"), "at which of the two 1 bit splits a block"
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
            bits, block_size=self.block_size, threshold=self.threshold, half_format=self.half_format
        )

    def require_use_with(self, bits: Set[float | str]) -> None:
        """See that each option that was given has an effect with some of these bits, of which
        "auto" may be any.

        Raises:
            UserError: it has none.
        """

        for name in ("threshold", "half_format"):
            with_it = bits_with(name)
            needs = f"gradient_bits={' or '.join(map(str, with_it))}"
            self.require_use(name, AUTO in bits or not bits.isdisjoint(with_it), needs)
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
        return (
            f"the {name} is not finite: its largest magnitude is {largest}; "
            "a smaller learning rate may help"
        )
    if bits < 32 and largest > LARGEST:
        return (
            f"the {name} is too large: its largest magnitude is {largest:.9g}, and at most "
            f"{LARGEST:g} can be exchanged with gradient_bits={bits}; "
            "a smaller learning rate may help"
        )
    return None
