"""The options of an exchange: one object that algorithms have, or its part that knows no bits."""

from __future__ import annotations

from collections.abc import Mapping

from ..compression import AUTO, CompressionOptions, GradientBits
from ..options import BySamples, Choice, Options, Whole, group, option, options
from .exchange import TRANSPORTS


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
    compression: CompressionOptions = group(CompressionOptions)
    route: TransportOptions = group(TransportOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compression.require_use_with(self.all_bits)

    @property
    def all_bits(self) -> set[float | str]:
        """The bits, or "auto", that are ever used."""
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
