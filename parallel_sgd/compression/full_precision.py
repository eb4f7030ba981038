"""The parameters' own precision: 32 bits, or float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..kernels import Blocks
from ..parameters import Parameters
from .codec import Array, Codec, register


@register(32)
@dataclass(frozen=True, kw_only=True)
class FullPrecision(Codec):
    """The values unchanged, float32 or float64: nothing is lost, and no residual is needed.

    Args:
        block_size: as for `HalfPrecision`.
    """

    bits: ClassVar[float] = 32

    def blocks(self, parameters: Parameters) -> Blocks:
        starts = parameters.block_starts(self.block_size)
        return Blocks(starts, parameters.dtype.itemsize * starts)

    def encode(self, blocks: Blocks, vector: Array, residual: Array, payload: Array) -> None:
        out = payload.view(vector.dtype)
        out[...] = vector
        out += residual
        residual.fill(0)

    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
        if add:
            out += payload.view(out.dtype)
        else:
            out[...] = payload.view(out.dtype)
