"""One bit per value: the sign."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ..kernels import Blocks, body, payload_offsets
from ..parameters import Parameters
from ..validation import choice, set_validated
from .codec import Array, Codec, register


@register(1, code="sign", usual=False)
@dataclass(frozen=True, kw_only=True)
class OneBit(Codec):
    """One bit per value and two float32 levels per block (Seide et al. 2014, §3).

    Args:
        block_size: the number of values with common levels.
        threshold: "zero": the bit is v >= 0 and the levels are the means of the two classes;
            "mean": the bit is v >= mean(v), and the levels are mean ± mean|v - mean|.

    Seide's blocks are the columns of a weight matrix. Ours have a fixed length, so parameters of
    any shape shrink equally.
    """

    bits: ClassVar[float] = 1
    learns: ClassVar[bool] = False
    threshold: str = "zero"

    def __post_init__(self) -> None:
        set_validated(self, threshold=choice("threshold", self.threshold, ("zero", "mean")))
        super().__post_init__()

    def blocks(self, parameters: Parameters) -> Blocks:
        starts = parameters.block_starts(self.block_size)
        return Blocks(starts, payload_offsets(starts, 1))

    def first_calls(self) -> list[Callable[[], object]]:
        return self._calls_without_values()

    def encode(self, blocks: Blocks, vector: Array, residual: Array, payload: Array) -> None:
        mean = self.threshold == "mean"
        body(vector).encode_1bit(blocks, vector, residual, payload, mean)

    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
        body(out).decode_1bit(blocks, payload, out, add)
