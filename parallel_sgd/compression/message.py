"""Messages of variable length, known only to their encoder, with one or several codecs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..kernels import Blocks
from ..kernels.entropy_reference import least_bytes
from .codec import ALIGNED, Array, Codec, padded
from .entropy_coded import FEW_VALUES, LENGTH_CAP, EntropyCoded
from .full_precision import FullPrecision
from .mixed import MixedBlocks
from .step_search import find_step, sample_of_sums, target_bits


class Allowance:
    """The step size of some messages, and the bytes these may still take.

    Args:
        codec: of the messages.
        pairs: (a, b) float32; the sums a + b are all values of the messages, see `sample_of_sums`.

    Attributes:
        step: found from a sample of the values.
        bytes_left: the bytes left for all messages together, not counting their heads. Initially
            `LENGTH_CAP` times the target length.
    """

    def __init__(self, codec: EntropyCoded, pairs: Sequence[tuple[Array | None, Array]]) -> None:
        values = sum(b.size for _, b in pairs)
        self.step, self.bytes_left = 1.0, 0
        if values:
            step = find_step(sample_of_sums(pairs), codec.bits, values)
            if not step.bits:  # the sample is all zeros
                step = find_step(sample_of_sums(pairs, of_all=True), codec.bits, values)
            # If many values are equal, either all of them are sent, or none ever would be.
            most = max(LENGTH_CAP * target_bits(codec.bits, values), 1.25 * step.bits)
            self.step, self.bytes_left = step.size, int(most * values / 8)

    def limit(self, room: int, head: int) -> int:
        """Return the largest length of the next message; `head` bytes are always allowed."""
        return min(room, (head + self.bytes_left) // ALIGNED * ALIGNED)

    def use(self, length: int, head: int) -> None:
        """Subtract the length of a written message."""
        self.bytes_left -= max(length - head, 0)


AllowanceOf = Callable[[EntropyCoded], Allowance]


class Section(NamedTuple):
    """Consecutive blocks of a message with the same codec.

    Attributes:
        codec: of the blocks.
        blocks: the blocks.
        values: the slice of the message's values.
        least: bytes always reserved for this section of the message; its exact length if the codec
            has a fixed length.
    """

    codec: Codec
    blocks: Blocks
    values: slice
    least: int


class VariableMessage:
    """The format of a message of some blocks: one section after another.

    Args:
        codec: without a fixed length for all messages.
        blocks: from `codec.blocks`, or a part of these.

    Local.
    """

    def __init__(self, codec: Codec, blocks: Blocks) -> None:
        if isinstance(blocks, MixedBlocks):
            parts = [(part.codec, part.blocks, part.values) for part in blocks.parts]
        else:
            size = blocks.values.stop - blocks.values.start
            parts = [(codec, blocks, slice(0, size))]
        self.sections = [_section(*part) for part in parts]

    def entropy_coded(self) -> list[tuple[EntropyCoded, slice]]:
        """Return the codecs that need a step size, and their values."""
        return [
            (section.codec, section.values)
            for section in self.sections
            if isinstance(section.codec, EntropyCoded)
        ]

    def encode(
        self, vector: Array | None, residual: Array, out: Array, allowance_of: AllowanceOf
    ) -> Array:
        """Encode v = vector + residual, and keep the error in the residual.

        Args:
            vector: float32 [n], unchanged; None for zeros.
            residual: float32 [n], in: the errors of earlier messages; out: v - q.
            out: uint8, with the room of `blocks`; the message is its beginning.
            allowance_of: returns the allowance of a codec that needs a step size.
        Returns:
            The message: uint8, a multiple of 4 bytes.
        """
        later, at = sum(section.least for section in self.sections), 0
        for codec, blocks, values, least in self.sections:
            v, error = None if vector is None else vector[values], residual[values]
            later -= least
            if isinstance(codec, EntropyCoded):
                allowance = allowance_of(codec)
                limit = allowance.limit(out.size - at - later, least)
                length = codec.encode(blocks, v, error, out[at : at + limit], allowance.step)
                allowance.use(length, least)
            else:
                length = blocks.bytes.stop - blocks.bytes.start
                if v is None:
                    v = error.copy()
                    error.fill(0)
                codec.encode(blocks, v, error, out[at : at + length])
                out[at + length : at + least] = 0
                length = least
            at += length
        return out[:at]

    def decode(self, message: Array, out: Array, add: bool) -> int:
        """Set ``out = q``, or with `add` ``out += q``.

        Args:
            message: uint8, which begins with the message.
            out: float32 [n].
            add: True to add.
        Returns:
            The length of the message in bytes.
        Raises:
            UserError: the message is damaged.
        """
        at = 0
        for codec, blocks, values, least in self.sections:
            length = blocks.bytes.stop - blocks.bytes.start
            part = message[at : at + length] if codec.has_fixed_length else message[at:]
            decoded = codec.decode(blocks, part, out[values], add)
            at += least if decoded is None else decoded
        return at

    def beginning(self, buffer: Array) -> Array:
        """Return the message at the beginning of a buffer."""
        at = 0
        for codec, _, _, least in self.sections:
            at += least if codec.has_fixed_length else _length(buffer, at)
        return buffer[:at]


def _section(codec: Codec, blocks: Blocks, values: slice) -> Section:
    size = values.stop - values.start
    if size < FEW_VALUES and not codec.has_fixed_length:
        codec, blocks = FullPrecision(), Blocks(blocks.starts, 4 * blocks.starts)
    fixed = padded(blocks.bytes.stop - blocks.bytes.start)
    return Section(codec, blocks, values, fixed if codec.has_fixed_length else least_bytes(size))


def _length(buffer: Array, at: int) -> int:
    """Return the padded length of the entropy-coded message that begins at byte `at`."""
    return padded(int(buffer[at : at + 4].view(np.uint32)[0]))
