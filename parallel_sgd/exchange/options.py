"""The options of an exchange: one object that algorithms have, or its part that knows no bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from ..compression import AUTO, Codec, CompressionOptions, GradientBits, Mixed
from ..options import ByPattern, BySamples, Choice, Options, Whole, group, option, options
from ..parameters import Parameters
from ..patterns import Patterns
from .exchange import TRANSPORTS, require_float32


@options
class TransportOptions(Options):
    """Which way a sum over all ranks travels, whatever its bits."""

    transport: str = option(
        AUTO,
        Choice(AUTO, *TRANSPORTS),
        "collective (the MPI library's all-to-all and all-gather), pipelined (pieces, some of "
        "which are encoded while others travel), or auto: the faster of them, by a short "
        "measurement before training; the sums have the same bits. nccl, for CuPy with a GPU for "
        "each rank, lets NCCL add up within hosts, or over all ranks at 32 bits unless "
        "hierarchical is true: equal to rounding, and the same bits on all ranks",
    )
    hierarchical: bool | str = option(
        AUTO,
        Choice(AUTO, True, False),
        "true lets the ranks of each host add up among themselves, in full precision, and send one "
        "message; auto does so where there are several hosts, and several ranks on one of them",
    )
    bucket_values: int = option(
        1 << 20,
        Whole(1),
        "at least so many values are exchanged as one bucket (whole parameters)",
    )


@options
class ExchangeOptions(Options):
    """How a sum over all ranks travels.

    Where the bits change, residuals stay, and enter the next sum.
    """

    gradient_bits: float | str | Mapping[int, float] = option(
        32,
        BySamples(GradientBits(), words=(AUTO,)),
        "bits a value on the wire, or such from so many samples on; 32 is the parameters' own "
        "precision; auto: for each bucket the bits that are fastest by a measurement of links and "
        "kernels before training, more bits where they cost no more than 5 % of the time",
    )
    bits_of: Patterns[float] = option(
        Patterns({}),
        ByPattern(GradientBits()),
        "bits of their own for some parameters, by a shell pattern of their names (*.bias:32) or "
        "by size (<1024:32, of fewer than 1024 values); the first that matches counts, and all "
        "others have gradient_bits",
    )
    compression: CompressionOptions = group(CompressionOptions)
    route: TransportOptions = group(TransportOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compression.require_use_with(self.all_bits)

    @property
    def all_bits(self) -> set[float | str]:
        """The bits, or "auto", that are ever used."""
        return self.usual_bits.union(self.bits_of.values())

    @property
    def usual_bits(self) -> set[float | str]:
        """Those of parameters without bits of their own."""
        bits = self.gradient_bits
        return set(bits.values()) if isinstance(bits, Mapping) else {bits}

    @property
    def lossless(self) -> bool:
        """Whether nothing is ever lost on the way."""
        return self.all_bits == {32}

    def bits_after(self, samples: int) -> float | str:
        """The bits of an exchange after so many samples, or "auto". Local."""
        bits = self.gradient_bits
        if isinstance(bits, Mapping):
            return bits[max(start for start in bits if start <= samples)]
        return bits

    def require_for(self, parameters: Parameters) -> None:
        """See that these parameters can be exchanged so. Local.

        Raises:
            UserError: fewer than 32 bits for parameters that are not float32, or a pattern that
                counts for none of them.
        """
        self.bits_of.require_matches("bits_of", {name: x.size for name, x in parameters.items()})
        every = [("gradient_bits", bits) for bits in self.usual_bits - {AUTO}]
        every += [(f"bits_of[{pattern!r}]", bits) for pattern, bits in self.bits_of.items()]
        for name, bits in every:
            require_float32(self.compression.codec(cast(float, bits)), parameters, name)

    def codec(self, bits: float) -> Codec:
        """Of a bucket whose parameters have so many bits, but for those with bits of their own."""
        codec = self.compression.codec
        if not self.bits_of or self.lossless:
            return codec(bits)
        own = {pattern: codec(number) for pattern, number in self.bits_of.items()}
        return Mixed(others=codec(bits), own=Patterns(own))
