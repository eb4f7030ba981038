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
        "collective (the MPI library's all-to-all and all-gather), pipelined (pieces are "
        "encoded while other pieces travel) or auto (the faster of both, by a short measurement "
        "before training), all with the same bits; nccl (CuPy, a GPU for each rank): NCCL sums "
        "within hosts, or over all ranks at 32 bits unless hierarchical is true; equal to the "
        "others up to rounding, with the same bits on all ranks",
    )
    hierarchical: bool | str = option(
        AUTO,
        Choice(AUTO, True, False),
        "true: the ranks of each host first sum among themselves, in full precision, and send "
        "one message; auto: true if there are several hosts, and several ranks on any of them",
    )
    bucket_values: int = option(
        1 << 20,
        Whole(1),
        "least number of values in a bucket, which is exchanged as a whole (whole parameters)",
    )


@options
class ExchangeOptions(BitsOptions):
    """The bits and the route of a sum over all ranks."""

    route: TransportOptions = group(TransportOptions)
