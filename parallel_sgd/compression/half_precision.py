"""16 bits per value: float16 or bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ..kernels import Blocks, body
from ..parameters import Parameters
from ..validation import choice, set_validated
from .codec import Array, Codec, register


@register(16)
@dataclass(frozen=True, kw_only=True)
class HalfPrecision(Codec):
    """16 bits per value: float16 or bfloat16.

    Args:
        half_format: "float16" has 11 significant bits; beyond ±65504 the largest value is sent, and
            the rest stays in the residual. "bfloat16" has 8 significant bits and the range of
            float32.
        block_size: vectors are cut into stripes only between blocks. If bits change during
            training, equal block sizes make the residuals fit.
    """

    bits: ClassVar[float] = 16
    half_format: str = "float16"

    def __post_init__(self) -> None:
        formats = ("float16", "bfloat16")
        set_validated(self, half_format=choice("half_format", self.half_format, formats))
        super().__post_init__()

    def blocks(self, parameters: Parameters) -> Blocks:
        starts = parameters.block_starts(self.block_size)
        return Blocks(starts, 2 * starts)

    def first_calls(self) -> list[Callable[[], object]]:
        return self._calls_without_values()

    def encode(self, blocks: Blocks, vector: Array, residual: Array, payload: Array) -> None:
        body(vector).encode_half(vector, residual, payload, self.half_format == "bfloat16")

    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
        body(out).decode_half(payload, out, add, self.half_format == "bfloat16")
