"""16 bits a value."""

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
    """16 bits a value.

    Args:
        half_format: "float16" (11 significant bits, beyond ±65504 the largest is sent and the rest
            stays in the residual) or "bfloat16" (8 significant bits, the range of float32).
        block_size: where the vector may be cut into stripes; as that of the codec to which or
            from which the bits change, whose residuals then fit.
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
