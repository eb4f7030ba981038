"""Who takes part: an algorithm by name, with the options that make it what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from parallel_sgd import Algorithm
from parallel_sgd.compression import Codec, register, unregister

Options = tuple[tuple[str, Any], ...]  #: an algorithm's options by name, as a value


@dataclass(frozen=True)
class Contender:
    """
    Attributes:
        title: for people.
        make: the algorithm, from its options.
        options: that it always has.
        local: whether ranks train alone for a block.
        first: other bits in the beginning, and for what part of all samples.
        codec: one of the benchmark's own that it needs, with its bits.
    """

    title: str
    make: Callable[..., Algorithm[Any]]
    options: Options = ()
    local: bool = False
    first: tuple[float, float] | None = None
    codec: tuple[float, type[Codec]] | None = None

    def algorithm(self, options: Options, block: int, samples: int = 0) -> Algorithm[Any]:
        """With blocks of so many minibatches, where it has blocks, in a run of so many samples."""
        every: dict[str, Any] = {"sync_steps": block} if self.local else {}
        every |= dict(self.options) | dict(options)
        if self.first:
            bits, part = self.first
            every["gradient_bits"] = {0: bits, round(part * samples): every["gradient_bits"]}
        return self.make(**every)

    @contextmanager
    def known(self) -> Iterator[None]:
        """For a `with` block its codec is registered: where it trains, and nowhere else."""
        if self.codec is None:
            yield
            return
        bits, codec = self.codec
        register(bits)(codec)
        try:
            yield
        finally:
            unregister(codec)
