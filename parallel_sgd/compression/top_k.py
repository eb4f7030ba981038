"""The values of largest magnitude, with two bits for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ..kernels import Blocks, body
from ..kernels.top_k_reference import VALUE_BITS, position_bits, top_k_offsets
from ..parameters import Parameters
from ..validation import number, set_validated
from .codec import Array, Codec, register_range

MIN_BITS, MAX_BITS = 0.05, 2.0  #: bits per value


@register_range(MIN_BITS, MAX_BITS, code="top-k", usual=False)
@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """The values of largest magnitude of each block: position, sign, and one of two levels.

        k = round(bits * block_size / (position bits + 2)), at least 1

    All other values are not sent, and stay in the residual. With 0.22 bits and blocks of 4096
    values k is 64, as in SparseLoCo (Sarfi et al., 2025, arXiv 2508.15706, section 3). The two
    levels of a block take 8 bytes more.

    Args:
        bits: per value, 0.05 to 2.
        block_size: the number of values from which the largest are selected.
    """

    learns: ClassVar[bool] = False
    bits: float  # type: ignore[misc]

    def __post_init__(self) -> None:
        bits = number("bits", self.bits, MIN_BITS, most=MAX_BITS)
        set_validated(self, bits=int(bits) if bits.is_integer() else bits)
        super().__post_init__()

    @property
    def kept(self) -> int:
        """The number of values that are sent of a full block."""
        width = position_bits(self.block_size) + VALUE_BITS
        return min(max(1, round(self.bits * self.block_size / width)), self.block_size)

    def blocks(self, parameters: Parameters) -> Blocks:
        starts = parameters.block_starts(self.block_size)
        return Blocks(starts, top_k_offsets(starts, self.kept, self.block_size))

    def first_calls(self) -> list[Callable[[], object]]:
        return self._calls_without_values()

    def encode(self, blocks: Blocks, vector: Array, residual: Array, payload: Array) -> None:
        body(vector).encode_top_k(self.kept, self.block_size, blocks, vector, residual, payload)

    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
        body(out).decode_top_k(self.kept, self.block_size, blocks, payload, out, add)
