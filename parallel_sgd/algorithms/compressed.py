"""What algorithms have in common that may send fewer bits than a value has."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from ..compression import Codec, HalfPrecision, OneBit, codec_for, registered_bits
from ..kernels import body
from ..validation import choice, points, require_use_of, settle
from .algorithm import Algorithm, Array

LARGEST = 1e30
"""With few bits. Beyond it the sums of a block could overflow: taken for divergence."""

AUTO = "auto"  #: what is measured before training, or follows from the hosts

StateT = TypeVar("StateT")


@dataclass(frozen=True, kw_only=True)
class CompressedAlgorithm(Algorithm[StateT], ABC):
    """Options of everything that is sent.

    Args:
        gradient_bits: 1, 2, 4, 8, 16 or 32 bits a value on the wire, or where the algorithm allows
            it a mapping from samples to bits: ``{0: 32, 20_000: 1}``. 32 means the parameters' own
            precision.
        block_size: values that share quantization levels (1 to 8 bits). With any bits buckets, and
            what a rank adds up of them, begin and end with a block.
        threshold: "zero" or "mean": how 1 bit splits a block (see `compression.OneBit`).
        half_format: "float16" or "bfloat16" for 16 bits.
        error_feedback: whether what a message loses is sent with the next one. Without it few
            bits do not converge: only to see what it is for.

    What the bits make no use of is refused; "auto" may take any.
    """

    takes_auto_bits: ClassVar[bool] = False

    gradient_bits: int | str | Mapping[int, int] = 32
    block_size: int = 1024
    threshold: str = "zero"
    half_format: str = "float16"
    error_feedback: bool = True

    def __post_init__(self) -> None:
        one_bit = OneBit(block_size=self.block_size, threshold=self.threshold)
        half = HalfPrecision(half_format=self.half_format)
        bits = self.gradient_bits
        settle(
            self,
            gradient_bits=points("gradient_bits", bits, _bits)
            if isinstance(bits, Mapping)
            else bits
            if self.takes_auto_bits and bits == AUTO
            else _bits("gradient_bits", bits),
            block_size=one_bit.block_size,
            threshold=one_bit.threshold,
            half_format=half.half_format,
            error_feedback=choice("error_feedback", self.error_feedback, (True, False)),
        )
        require_use_of(self, "threshold", self.may_use(1), "gradient_bits=1")
        require_use_of(self, "half_format", self.may_use(16), "gradient_bits=16")
        few = [bits for bits in registered_bits() if bits < 32]
        require_use_of(self, "error_feedback", self.may_use(*few), "gradient_bits of less than 32")

    def may_use(self, *bits: float) -> bool:
        """Whether any of these numbers of bits may ever be used."""
        given = self.gradient_bits
        ever = set(given.values()) if isinstance(given, Mapping) else {given}
        return AUTO in ever or not ever.isdisjoint(bits)

    def codec(self, bits: float) -> Codec:
        """The codec that these options mean at so many bits."""
        return codec_for(
            bits,
            block_size=self.block_size,
            threshold=self.threshold,
            half_format=self.half_format,
        )


def problem_with(vector: Array, bits: float = 32, name: str = "gradient") -> str | None:
    """Why a vector cannot be exchanged with so many bits; None where it can.

    Full precision takes all that is finite: a sum that overflows shows in the next gradient.

    Local. Cost: reads the vector once.
    """
    worst = body(vector).largest_magnitude(vector)
    if not math.isfinite(worst):
        return (
            f"the {name} is not finite: its largest magnitude is {worst}; "
            "a smaller learning rate may help"
        )
    if bits < 32 and worst > vector.dtype.type(LARGEST):
        return (
            f"the {name} is too large: its largest magnitude is {worst:.9g}, and at most "
            f"{LARGEST:g} can be exchanged with gradient_bits={bits}; "
            "a smaller learning rate may help"
        )
    return None


def _bits(_: str, value: Any) -> float:
    return choice("gradient_bits", value, registered_bits())
