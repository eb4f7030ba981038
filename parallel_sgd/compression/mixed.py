"""Several codecs in one payload: some parameters have a codec of their own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from ..kernels import Blocks
from ..parameters import Parameters
from ..patterns import Patterns
from ..validation import set_validated
from .codec import Array, Codec, padded


@dataclass(frozen=True, kw_only=True)
class Mixed(Codec):
    """Each parameter with the codec of the first matching pattern, or with `others`.

        parameters  |<-- W ------------->|<- b ->|<- c ->|<-- V ----------------->|
        codecs      |      others        |  own: 32 bits |        others          |
        blocks      |......|......|......|...............|......|......|......|...|

    Small neighbours share a block only if patterns give both the same codec, or neither a codec. So
    blocks stay the same when `others` changes, and residuals remain valid.

    Args:
        others: the codec of all parameters without a matching pattern.
        own: codecs by pattern, with the same block_size.
    """

    others: Codec
    own: Patterns[Codec]

    def __post_init__(self) -> None:
        set_validated(self, block_size=self.others.block_size)
        assert {codec.block_size for codec in self.own.values()} <= {self.block_size}
        super().__post_init__()

    @property
    def bits(self) -> float:  # type: ignore[override]
        """The fewest bits of all codecs."""
        return min(codec.bits for codec in (self.others, *self.own.values()))

    @property
    def has_fixed_length(self) -> bool:  # type: ignore[override]
        """True if all codecs have a fixed length."""
        return all(codec.has_fixed_length for codec in (self.others, *self.own.values()))

    def codec_of(self, name: str, size: int) -> Codec:
        """Return the codec of a parameter with this name and number of values."""
        return self.own.value_of(name, size) or self.others

    def to_dict(self) -> dict[str, Any]:
        own = {pattern: codec.to_dict() for pattern, codec in self.own.items()}
        return {"name": "Mixed", "others": self.others.to_dict(), "own": own}

    def blocks(self, parameters: Parameters) -> MixedBlocks:
        runs: list[Run] = []
        starts, lengths = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
        first = values = last = 0
        by_codec = groupby(self.own.value_of(name, x.size) for name, x in parameters.items())
        for own, members in by_codec:
            begin, last = last, last + sum(1 for _ in members)
            codec = own or self.others
            blocks = codec.blocks(parameters.part(begin, last))
            length = np.diff(blocks.offsets)
            aligned = padded(length)
            ends = [*(np.flatnonzero(length < aligned) + 1).tolist(), len(blocks)]
            runs += [
                Run(codec, first + a, blocks.part(a, b)) for a, b in pairwise([0, *ends]) if a < b
            ]
            starts.append(values + blocks.starts[1:])
            lengths.append(aligned)
            first, values = first + len(blocks), values + int(blocks.starts[-1])
        offsets = np.concatenate(lengths).cumsum()
        return MixedBlocks(np.concatenate(starts), offsets, tuple(runs), 0)

    def first_calls(self) -> list[Callable[[], object]]:
        return [call for codec in (self.others, *self.own.values()) for call in codec.first_calls()]

    def encode(self, blocks: Blocks, vector: Array, residual: Array, payload: Array) -> None:
        for codec, part, values, place, end in _parts(blocks):
            codec.encode(part, vector[values], residual[values], payload[place])
            payload[place.stop : end] = 0

    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
        for codec, part, values, place, _ in _parts(blocks):
            codec.decode(part, payload[place], out[values], add)


class Run(NamedTuple):
    """Consecutive blocks of one codec; only the last may be padded.

    Attributes:
        codec: of all blocks.
        first: the index of the first block among all blocks.
        blocks: positions in a vector and a payload of the run alone.
    """

    codec: Codec
    first: int
    blocks: Blocks


class Part(NamedTuple):
    """Some blocks of a run, encoded together.

    Attributes:
        codec: of the run.
        blocks: of the run.
        values, bytes: slices of arrays with just the blocks of the `MixedBlocks`.
        end: of the bytes with their padding.
    """

    codec: Codec
    blocks: Blocks
    values: slice
    bytes: slice
    end: int


@dataclass(frozen=True, eq=False)
class MixedBlocks(Blocks):
    """Blocks that know their codecs.

    Args:
        runs: of the whole vector.
        first: the index of the first of these blocks in the whole vector.
    """

    runs: tuple[Run, ...]
    first: int

    def part(self, first: int, last: int) -> MixedBlocks:
        part = super().part(first, last)
        return MixedBlocks(part.starts, part.offsets, self.runs, self.first + first)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """These blocks by codec, in the order of the vector."""
        return tuple(self._parts())

    def _parts(self) -> Iterator[Part]:
        begin, end = self.first, self.first + len(self)
        values = (self.starts - self.starts[0]).tolist()
        places = (self.offsets - self.offsets[0]).tolist()
        number = max(0, bisect_right(self.runs, begin, key=lambda run: run.first) - 1)
        for codec, first, blocks in self.runs[number:]:
            a, b = max(begin, first), min(end, first + len(blocks))
            if first >= end:
                return
            if a < b:
                own = blocks.part(a - first, b - first)
                place = places[a - begin]
                length = own.bytes.stop - own.bytes.start
                yield Part(
                    codec,
                    own,
                    slice(values[a - begin], values[b - begin]),
                    slice(place, place + length),
                    places[b - begin],
                )


def _parts(blocks: Blocks) -> tuple[Part, ...]:
    assert isinstance(blocks, MixedBlocks), "the blocks of another codec"
    return blocks.parts
