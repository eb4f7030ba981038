"""Any number of bits per value from 0.05 to 8, by an entropy code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..errors import UserError
from ..kernels import Blocks, body
from ..kernels.entropy_reference import DAMAGED, least_bytes
from ..parameters import Parameters
from ..validation import number, set_validated
from .codec import Array, Codec, padded, register_range
from .step_search import find_step, message_room

MIN_BITS, MAX_BITS = 0.05, 8.0  #: bits per value
LENGTH_CAP = 4  #: the longest message, as a multiple of its target length, on average
FEW_VALUES = 8  #: values: a shorter part of a vector is sent unchanged, which takes no more bytes
ROOM_BITS = 4.0  #: bits per value: the least room for a part of a vector


@register_range(MIN_BITS, MAX_BITS, points=(0.1, 0.25, 0.5, 1), code="entropy")
@dataclass(frozen=True, kw_only=True)
class EntropyCoded(Codec):
    """Integer multiples of a single step size for all values, in an entropy code.

        k = round(v / step)      q = k * step

    A large value takes four or five bits, a small value a tenth of a bit. This is reverse
    water-filling (Cover and Thomas, "Elements of Information Theory", 10.3.3), which has the
    smallest error for a given number of bits (uniform quantization with an entropy code at low
    rates: Gish and Pierce 1968; of gradients: Alistarh et al., QSGD, 2017). Rounding is plain,
    without a dead zone: the error is then uniform over ±step/2, and a drift is hardly delayed.

    The length of a message depends on its values. The step is chosen to give about the requested
    bits: `step_search`.

    Args:
        bits: per value, on average: 0.05 to 8; but at least 64 bytes for a vector of few values.
        block_size: vectors are cut only between blocks, as with the other codecs.
    """

    has_fixed_length: ClassVar[bool] = False
    learns_blocks: ClassVar[bool] = False
    bits: float  # type: ignore[misc]

    def __post_init__(self) -> None:
        bits = number("bits", self.bits, MIN_BITS, most=MAX_BITS)
        set_validated(self, bits=int(bits) if bits.is_integer() else bits)
        super().__post_init__()

    @property
    def learns(self) -> bool:  # type: ignore[override]
        return self.bits >= 1

    def blocks(self, parameters: Parameters) -> Blocks:
        """Allocate room for messages of any blocks.

        The room is `LENGTH_CAP` times the bits, but at least `ROOM_BITS` and at most 16 bits per
        value.
        """
        starts = parameters.block_starts(self.block_size)
        room = min(max(LENGTH_CAP * self.bits, ROOM_BITS), 16.0) / 8
        sizes = np.diff(starts)
        bytes_of_blocks = least_bytes(1) + padded(np.ceil(sizes * room).astype(np.int64))
        bytes_of_blocks = np.maximum(bytes_of_blocks, 4 * np.minimum(sizes, FEW_VALUES))
        return Blocks(starts, np.concatenate([[0], np.cumsum(bytes_of_blocks)]).astype(np.int64))

    def encoded_bytes(self, values: int) -> float:
        return values * self.bits / 8

    def first_calls(self) -> list[Callable[[], object]]:
        none, room = np.zeros(0, np.float32), np.zeros(message_room(0), np.uint8)
        kernels = body(none)
        return [
            lambda: kernels.largest_magnitude(none),
            lambda: kernels.encode_entropy(none, none, room, 1.0),
            lambda: kernels.encode_entropy(None, none, room, 1.0),
            lambda: kernels.decode_entropy(room, none, False),
        ]

    def encode(
        self,
        blocks: Blocks,
        vector: Array | None,
        residual: Array,
        payload: Array,
        step: float | None = None,
    ) -> int:
        """See `Codec.encode`.

        Args:
            vector: None for zeros.
            payload: at least `least_bytes` of this number of values. A message that would not fit
                uses a larger step.
            step: from `find_step`. Default: found from these values.
        """
        if step is None:
            v = residual if vector is None else vector + residual
            step = find_step(v, self.bits, v.size).size
        length: int = body(residual).encode_entropy(vector, residual, payload, step)
        aligned = padded(length)
        payload[length:aligned] = 0
        return aligned

    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> int:
        length: int = body(out).decode_entropy(payload, out, add)
        if length == DAMAGED:
            raise UserError(f"a message of {out.size} values with {self.bits:g} bits is damaged")
        return padded(length)
