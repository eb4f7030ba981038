"""One of 8, 16 or 32 values: about 1, 1/2 and 1/4 bit a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ..kernels import Blocks, body, one_of_offsets
from ..parameters import Parameters
from ..validation import choice, set_validated
from .codec import Array, Codec, register

GROUPS = {1: 8, 0.5: 16, 0.25: 32}  #: values to a lane, by bits


@register(*GROUPS, code="largest")
@dataclass(frozen=True, kw_only=True)
class OneOf(Codec):
    """The largest of every 8, 16 or 32 values, well, and of the others nothing, yet.

    A byte says which it is, its sign and its magnitude, as a power of two below the largest of the
    block. All that is not sent stays in the residual, and goes when it has become the largest. So
    no value is ever sent as a larger one, or with another sign, as the values near zero are with
    one bit each; an optimizer with momentum or Adam's would repeat that.

    Args:
        group: 8, 16 or 32 values of which one is sent; with what blocks share, 1.03, 0.53 and 0.28
            bits a value.
        block_size: values that share their largest magnitude, one float32.
    """

    learns_blocks: ClassVar[bool] = False
    group: int = 8

    def __post_init__(self) -> None:
        set_validated(self, group=choice("group", self.group, tuple(GROUPS.values())))
        super().__post_init__()

    @classmethod
    def for_bits(cls, bits: float, **options: Any) -> OneOf:
        return super().for_bits(bits, group=GROUPS[bits], **options)

    @property
    def learns(self) -> bool:  # type: ignore[override]
        return self.group == 8

    @property
    def bits(self) -> float:  # type: ignore[override]
        return next(bits for bits, group in GROUPS.items() if group == self.group)

    def blocks(self, parameters: Parameters) -> Blocks:
        starts = parameters.block_starts(self.block_size)
        return Blocks(starts, one_of_offsets(starts, self.group))

    def first_calls(self) -> list[Callable[[], object]]:
        return self._calls_without_values()

    def encode(self, blocks: Blocks, vector: Array, residual: Array, payload: Array) -> None:
        body(vector).encode_one_of(self.group, blocks, vector, residual, payload)

    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
        body(out).decode_one_of(self.group, blocks, payload, out, add)
