"""Any number of bits a value from 0.05 to 8, by an entropy code."""

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
from .codec import ALIGNED, Array, Codec, register_range
from .step_search import find_step, message_room

FEWEST, MOST = 0.05, 8.0  #: bits a value
CAP = 4  #: times as many bits as it should have, on average, are the most that a message has
FEW = 8  #: values: fewer of a part of a vector travel as they are, which takes no more bytes
ROOM = 4.0  #: bits a value, at least, for which a part of a vector has room


@register_range(FEWEST, MOST, points=(0.1, 0.25, 0.5, 1), code="entropy")
@dataclass(frozen=True, kw_only=True)
class EntropyCoded(Codec):
    """Whole multiples of one step for all values, in an entropy code.

        k = round(v / step)      q = k * step

    A large value takes four or five bits by itself, a small one a tenth of a bit: that is reverse
    water-filling (Cover and Thomas, "Elements of Information Theory", 10.3.3), which leaves the
    least behind that so many bits can (uniform quantization with an entropy code at low rates: Gish
    and Pierce 1968; of gradients: Alistarh et al., QSGD, 2017). Rounding is plain, without a dead
    zone: then what is left behind is evenly spread over ±step/2, and a drift hardly waits.

    A message is as long as its values make it. The step is chosen so that it has about as many bits
    as it should: `step_search`.

    Args:
        bits: a value, on average: 0.05 to 8; but 64 bytes for a vector of few values.
        block_size: where a vector may be cut, as those of the other codecs.
    """

    has_fixed_length: ClassVar[bool] = False
    learns_blocks: ClassVar[bool] = False
    bits: float  # type: ignore[misc]

    def __post_init__(self) -> None:
        bits = number("bits", self.bits, FEWEST, most=MOST)
        set_validated(self, bits=int(bits) if bits.is_integer() else bits)
        super().__post_init__()

    @property
    def learns(self) -> bool:  # type: ignore[override]
        return self.bits >= 1

    def blocks(self, parameters: Parameters) -> Blocks:
        """Room for the message of any blocks: `ROOM` bits a value or `CAP` times the bits."""
        starts = parameters.block_starts(self.block_size)
        room = min(max(CAP * self.bits, ROOM), 16.0) / 8
        sizes = np.diff(starts)
        bytes_of_blocks = least_bytes(1) + np.ceil(sizes * room / 4).astype(np.int64) * 4
        bytes_of_blocks = np.maximum(bytes_of_blocks, 4 * np.minimum(sizes, FEW))
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
            vector: may be None for zeros.
            payload: at least `least_bytes` of as many values. A longer message has a larger step.
            step: as `find_step` gives it; found from these very values if not given.
        """
        if step is None:
            v = residual if vector is None else vector + residual
            step = find_step(v, self.bits, v.size).size
        length: int = body(residual).encode_entropy(vector, residual, payload, step)
        padded = -(-length // ALIGNED) * ALIGNED
        payload[length:padded] = 0
        return padded

    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> int:
        length: int = body(out).decode_entropy(payload, out, add)
        if length == DAMAGED:
            raise UserError(f"a message of {out.size} values with {self.bits:g} bits is damaged")
        return -(-length // ALIGNED) * ALIGNED
