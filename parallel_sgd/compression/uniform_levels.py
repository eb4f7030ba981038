"""4 or 8 bits per value: evenly spaced levels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..kernels import Blocks, body, payload_offsets
from ..parameters import Parameters
from ..validation import choice, set_validated
from .codec import Array, Codec, register


@register(4, 8, code="levels")
@dataclass(frozen=True, kw_only=True)
class UniformLevels(Codec):
    """4 or 8 bits per value: 2**bits - 1 evenly spaced levels around an exact zero.

        step = max|v| / (2**(bits - 1) - 1)      code = round(v / step)      q = code * step

    Args:
        bits: 4 or 8.
        block_size: the number of values with a common spacing, a float32.
    """

    bits: int  # type: ignore[misc]

    def __post_init__(self) -> None:
        set_validated(self, bits=choice("bits", self.bits, (4, 8)))
        super().__post_init__()

    def blocks(self, parameters: Parameters) -> Blocks:
        starts = parameters.block_starts(self.block_size)
        return Blocks(starts, payload_offsets(starts, self.bits))

    def first_calls(self) -> list[Callable[[], object]]:
        return self._calls_without_values()

    def encode(self, blocks: Blocks, vector: Array, residual: Array, payload: Array) -> None:
        body(vector).encode_levels(self.bits, blocks, vector, residual, payload)

    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
        body(out).decode_levels(self.bits, blocks, payload, out, add)
