"""The options of an exchange: `ExchangeOptions`, and its part `TransportOptions` without bits."""

from __future__ import annotations

from ..compression import AUTO, BitsOptions
from ..options import Choice, Options, Whole, group, option, options
from .exchange import TRANSPORTS


@options
class TransportOptions(Options):
    """The route of a sum over all ranks, independent of bits."""

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
class ExchangeOptions(BitsOptions):
    """The bits and the route of a sum over all ranks."""

    route: TransportOptions = group(TransportOptions)
