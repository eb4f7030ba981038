"""The choices of an exchange before training: its buckets, their bits, and a transport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ..communication import Communicator
from ..compression import AUTO, Codec, Mixed, auto_bits
from ..costs import Measured
from ..exchange import (
    Bucket,
    ExchangeOptions,
    ExchangePlan,
    choose_bits,
    choose_plan,
    cut_buckets,
    topology_for,
)
from ..parameters import Parameters


@dataclass(frozen=True)
class ExchangeChoices:
    """The choices of an exchange; the names are those of `ExchangeState`."""

    buckets: list[Bucket]
    bits: dict[str, float] | None
    measured: Measured | None
    plan: ExchangePlan


def choose(
    options: ExchangeOptions,
    parameters: Parameters,
    comm: Communicator,
    of_blocks: bool,
    overlap: bool,
    earlier: dict[str, Any],
    name: str,
    fragments: int,
) -> ExchangeChoices:
    """Choose buckets, bits and transport, by measurements if options are "auto".

    Args:
        options: of the exchange.
        parameters: layout of the vectors.
        comm: the ranks.
        of_blocks: True if vectors are the changes of blocks: see `auto_bits`.
        overlap: True if buckets are sent while later ones are computed.
        earlier: all choices of the algorithm, of `Work`: used if there are any; changed.
        name: of the exchange among these.
        fragments: number of parts of the vector that are exchanged at different times.
    Raises:
        SharedError: as `choose_plan`.
        UserError: more fragments than parameters: see `cut_buckets`.

    Collective.
    """
    block_size, route = options.compression.block_size, options.route
    starts = options.codec(32).blocks(parameters).starts
    buckets = cut_buckets(parameters, block_size, route.bucket_values, starts, fragments)
    bits, measured = None, None
    if AUTO in options.all_bits:
        bits = earlier.get(f"bits of the {name}")
    if AUTO in options.all_bits and bits is None:
        flat = route.transport == "collective"
        topology = topology_for(comm.hosts, False if flat else route.hierarchical)
        possible = auto_bits(of_blocks=of_blocks)
        bits, measured = choose_bits(
            buckets, parameters, comm, topology, block_size, possible, overlap
        )
        earlier[f"bits of the {name}"] = bits
    plan = choose_plan(
        parameters,
        comm,
        route.transport,
        route.hierarchical,
        codec=_codec_to_try(options, parameters, buckets, bits),
        lossless=options.lossless,
        chosen=earlier.get(f"transport of the {name}"),
    )
    if plan.choice is not None:
        earlier[f"transport of the {name}"] = plan.choice
    return ExchangeChoices(buckets, bits, measured, plan)


def codecs_of(
    options: ExchangeOptions, chosen: Mapping[str, float] | None, bits: float | str, buckets: int
) -> list[Codec | None]:
    """Return the codec of each bucket. None for full precision if no bucket has residuals. Local.

    Args:
        options: of the exchange.
        chosen: bits of each bucket, chosen by ``gradient_bits="auto"``, or None.
        bits: of all buckets if there are no chosen bits.
        buckets: their number.
    """
    of_buckets = [chosen[str(i)] if chosen else cast(float, bits) for i in range(buckets)]
    lossless = options.lossless or (chosen is not None and not options.bits_of)
    return [None if b == 32 and lossless else options.codec(b) for b in of_buckets]


def _codec_to_try(
    options: ExchangeOptions,
    parameters: Parameters,
    buckets: list[Bucket],
    bits: Mapping[str, float] | None,
) -> Codec | None:
    """Return the codec of the largest parameter in the largest bucket."""
    sizes = [bucket.values.stop - bucket.values.start for bucket in buckets]
    largest = sizes.index(max(sizes))
    codec = codecs_of(options, bits, options.bits_after(0), len(buckets))[largest]
    if isinstance(codec, Mixed):
        size, name = max((parameters[name].size, name) for name in buckets[largest].names)
        codec = codec.codec_of(name, size)
    return codec
