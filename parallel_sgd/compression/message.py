"""Messages whose length only their encoder knows: some blocks, of one codec or of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..kernels import Blocks
from ..kernels.entropy_reference import least_bytes
from .codec import ALIGNED, Array, Codec
from .entropy_coded import CAP, FEW, EntropyCoded
from .full_precision import FullPrecision
from .mixed import MixedBlocks
from .step_search import find_step, sample_of_sums, target_bits


class Allowance:
    """The step of quantization of some messages, and how long these may still be.

    Args:
        codec: theirs.
        pairs: (a, b) float32, whose sums are all values of the messages; see `sample_of_sums`.

    Attributes:
        step: found from a sample of the values.
        left: bytes that all messages together may still have beside their heads: `CAP` times as
            many as they should have, at the beginning.
    """

    def __init__(self, codec: EntropyCoded, pairs: Sequence[tuple[Array | None, Array]]) -> None:
        values = sum(b.size for _, b in pairs)
        self.step, self.left = 1.0, 0
        if values:
            step = find_step(sample_of_sums(pairs), codec.bits, values)
            if not step.bits:  # all of the sample is 0
                step = find_step(sample_of_sums(pairs, of_all=True), codec.bits, values)
            # Where many values are alike, all of them are sent, or none would ever be.
            most = max(CAP * target_bits(codec.bits, values), 1.25 * step.bits)
            self.step, self.left = step.size, int(most * values / 8)

    def limit(self, room: int, head: int) -> int:
        """Bytes that the next message may have, of which `head` are always allowed."""
        return min(room, (head + self.left) // ALIGNED * ALIGNED)

    def use(self, length: int, head: int) -> None:
        """A message has been written."""
        self.left -= max(length - head, 0)


AllowanceOf = Callable[[EntropyCoded], Allowance]


class Section(NamedTuple):
    """Consecutive blocks of a message with one codec.

    Attributes:
        values: of the message.
        least: bytes that this part of the message always has room for; all that it takes, where
            the codec has a fixed length.
    """

    codec: Codec
    blocks: Blocks
    values: slice
    least: int


class VariableMessage:
    """The messages of some blocks: those of their sections, one behind the other.

    Args:
        codec: of which not all messages have a fixed length.
        blocks: as `codec.blocks` has made them, or a part.

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
        """The codecs with steps, and their values."""
        return [
            (section.codec, section.values)
            for section in self.sections
            if isinstance(section.codec, EntropyCoded)
        ]

    def encode(
        self, vector: Array | None, residual: Array, out: Array, allowance_of: AllowanceOf
    ) -> Array:
        """Encode v = vector + residual and keep what is lost.

        Args:
            vector: float32 [n], unchanged; None for zeros.
            residual: float32 [n], in: what earlier messages lost; out: v - q.
            out: uint8, with the room that `blocks` have; the message is its beginning.
            allowance_of: for each codec with steps.
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
        """``out = q``, or with `add` ``out += q``: the bytes of the message, with which `message`
        begins.

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
        """The message with which a buffer begins."""
        at = 0
        for codec, _, _, least in self.sections:
            at += least if codec.has_fixed_length else _length(buffer, at)
        return buffer[:at]


def _section(codec: Codec, blocks: Blocks, values: slice) -> Section:
    size = values.stop - values.start
    if size < FEW and not codec.has_fixed_length:
        codec, blocks = FullPrecision(), Blocks(blocks.starts, 4 * blocks.starts)
    fixed = _padded(blocks.bytes.stop - blocks.bytes.start)
    return Section(codec, blocks, values, fixed if codec.has_fixed_length else least_bytes(size))


def _length(buffer: Array, at: int) -> int:
    """Bytes of the message of an entropy code that begins at a byte."""
    return _padded(int(buffer[at : at + 4].view(np.uint32)[0]))


def _padded(length: int) -> int:
    return -(-length // ALIGNED) * ALIGNED
