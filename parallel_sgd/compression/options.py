"""The options of compression, and the checks of vectors before sending."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any, cast

import numpy as np

from ..errors import SMALLER_RATE, NotFinite
from ..kernels import body
from ..options import Choice, Options, Real, Whole, option, options
from .codec import (
    CODE,
    Array,
    Codec,
    auto_bits,
    bits_for_code,
    checked_bits,
    codec_for,
    codecs_with,
    has_code,
    registered_codes,
)

LARGEST = float(np.float32(1e30))
"""The largest magnitude to send with few bits. Beyond, sums of a block could overflow: treated as
divergence."""

AUTO = "auto"  #: chosen by measurements before training, or by the hosts


class GradientBits:
    """A check for bits per value: a codec must exist."""

    metavar = "N"
    expected = "a number of bits"

    def __call__(self, name: str, value: Any) -> float:
        return checked_bits(name, value)

    def read(self, text: str) -> float | str:
        """Return the text as a number if possible, or else as text for the check to reject."""
        try:
            return int(text) if text.isdigit() else float(text)
        except ValueError:
            return text


class Code(Choice):
    """A choice among the registered codes."""

    @property
    def values(self) -> Sequence[Any]:
        return registered_codes()


@options
class CompressionOptions(Options):
    """The conversion of values to bits. Options without effect for the given bits are rejected."""

    code: str = option(
        CODE,
        Code(),
        "how values become bits: entropy (multiples of one step for all values, in an entropy "
        "code; 0.05 to 8 bits), levels (evenly spaced levels for each block; 4 and 8 bits), "
        "sign (1 bit, Seide et al. 2014; learns with plain SGD only), top-k (only the largest "
        "values of each block, with two bits for each; 0.05 to 2 bits; 0.22 with "
        "block_size=4096 as in SparseLoCo), auto (levels for 4 and 8 bits, entropy for all "
        "others below 16)",
    )
    block_size: int = option(
        1024,
        Whole(1, 2**20),
        "values that share quantization levels (levels, sign, top-k); with any bits, buckets and "
        "each rank's part of a bucket begin and end with a block",
    )
    threshold: str = option(
        "zero", Choice("zero", "mean"), "threshold between the two signs of a block"
    )
    half_format: str = option("float16", Choice("float16", "bfloat16"), "format of 16 bits")
    error_feedback: bool = option(
        True,
        Choice(True, False),
        "add what a message loses to the next message; without error feedback, training with "
        "few bits does not converge (for comparisons only)",
    )
    residual_decay: float = option(
        1.0,
        Real(most=1),
        "in [0, 1]: factor of what earlier messages have lost, before each message; below 1 the "
        "rest of it is forgotten (SparseLoCo: 0.95); with 32 bits nothing is lost",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_use("residual_decay", self.error_feedback, "error_feedback=True")

    @property
    def decay(self) -> float:
        """The factor of the residuals before each message; 0 without error feedback."""
        return self.residual_decay if self.error_feedback else 0.0

    def codec(self, bits: float) -> Codec:
        """Return the codec that these options select for `bits`."""
        return codec_for(
            bits,
            code=self.code,
            block_size=self.block_size,
            threshold=self.threshold,
            half_format=self.half_format,
        )

    def require_use_with(self, bits: Set[float | str]) -> None:
        """Check that each given option has an effect with some of these bits.

        Raises:
            UserError: an option has no effect.
        """
        possible = bits | set(auto_bits() if AUTO in bits else ())
        codecs = {type(self.codec(cast(float, one))) for one in possible - {AUTO}}
        for name in ("threshold", "half_format"):
            users = codecs_with(name)
            self.require_use(name, not codecs.isdisjoint(users), " or ".join(users.values()))
        numbers = [one for one in bits if not isinstance(one, str)]
        has = self.code == CODE or any(has_code(number, self.code) for number in numbers)
        self.require_use("code", has, bits_for_code(self.code))
        few = any(isinstance(number, str) or number < 32 for number in bits)
        self.require_use("error_feedback", few, "gradient_bits of less than 32")


def problem_with(vector: Array, bits: float = 32, name: str = "gradient") -> str | None:
    """Return the reason why a vector cannot be exchanged with these bits, or None if it can.

    Full precision accepts all finite values; an overflowing sum shows up in the next gradient.

    Local. Cost: reads the vector once.
    """
    return problem_with_largest(body(vector).largest_magnitude(vector), bits, name)


def problem_with_largest(largest: float, bits: float, name: str) -> str | None:
    """Return the result of `problem_with` for a vector of known largest magnitude. Local."""
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
