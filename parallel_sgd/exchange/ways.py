"""Which way messages take: decided once, before training, by the hosts and a short measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..communication import Communicator
from ..compression import Codec
from ..errors import SharedError
from ..parameters import Parameters
from .costs import KernelSpeeds, Link, best_bits, exchange_s
from .exchange import Exchange
from .kernel_speeds import measure_kernel_speeds
from .links import measure_link
from .nccl import Nccl, start_nccl
from .pieces import Bucket
from .routes import Routes, routes_for

__all__ = [
    "SHORT",
    "TRIED_S",
    "Measured",
    "Way",
    "choose_bits",
    "choose_way",
    "measure",
    "try_transports",
]

Array = Any  #: a NumPy or CuPy array

SHORT = 1 << 16
"""Values: shorter vectors take the library's collectives untried, unless hosts add up first."""
TRIED_S = 0.1  #: about as long may an exchange take by which the ways are compared


@dataclass(frozen=True)
class Way:
    """
    Attributes:
        transport: see `Exchange`.
        routes: see `Exchange`.
        seconds: what exchanges of `values` float32 took by each transport; empty where nothing had
            to be tried.
        values: of those exchanges.
        nccl: see `Exchange`.
    """

    transport: str
    routes: Routes
    seconds: dict[str, float]
    values: int = 0
    nccl: Nccl | None = None

    def close(self) -> None:
        """Give back what NCCL has. Collective."""
        if self.nccl is not None:
            self.nccl.close()

    def __str__(self) -> str:
        routes = self.routes
        ranks, hosts = len(routes.host_of), len(routes.hosts)
        text = f"{self.transport} exchange"
        if routes.hierarchical:
            counted = f"{hosts} host{'s' * (hosts > 1)}"
            text += f", {ranks} ranks in {counted} first among themselves"
        if self.seconds:
            tried = ", ".join(f"{name} {s * 1e3:.3g} ms" for name, s in self.seconds.items())
            text += f" ({self.values} float32 tried: {tried})"
        return text

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        tried = {"values": self.values, "seconds": self.seconds} if self.seconds else None
        return {
            "transport": self.transport,
            "hierarchical": self.routes.hierarchical,
            "tried": tried,
        }


@dataclass(frozen=True)
class Measured:
    """What says how many bits are fastest.

    Attributes:
        ranks: that exchange.
        ranks_per_host: that first add up among themselves; of uneven hosts the fewest, and then
            `ranks` are as many as there would be.
        link: of the slowest host.
        speeds: of the first rank's kernels, while all ranks ran theirs.
    """

    ranks: int
    ranks_per_host: int
    link: Link
    speeds: KernelSpeeds

    def best_bits(self, values: int) -> int:
        """For a bucket of so many float32. Local."""
        local = self.ranks_per_host
        return best_bits(values, self.ranks, self.link, self.speeds, ranks_per_host=local)

    def seconds(self, values: int, bits: int) -> float:
        """What an exchange of a bucket is predicted to take, in a pipeline. Local."""
        local = self.ranks_per_host
        cost = exchange_s(values, bits, self.ranks, self.link, self.speeds, ranks_per_host=local)
        return cost.total_s

    def __str__(self) -> str:
        link, speeds = self.link, self.speeds
        kernels = [
            f"{bits} bit {speeds.encode[bits] / 1e9:.2g}, {speeds.decode[bits] / 1e9:.2g}"
            for bits in sorted(speeds.encode)
            if bits < 32
        ]
        return (
            f"links of {link.bytes_per_s / 1e6:,.4g} MB/s and {link.latency_s * 1e6:,.3g} us; "
            f"encode and decode, G values/s: {'; '.join(kernels)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it, without what is no limit: rates in bytes and values a second."""
        kernels = {
            name: {str(bits): speed for bits, speed in each.items() if speed < math.inf}
            for name, each in vars(self.speeds).items()
        }
        rate = self.link.bytes_per_s
        link = {
            "latency_s": self.link.latency_s,
            "bytes_per_s": rate if rate < math.inf else None,
        }
        return {"link": link, "values_per_s": kernels}


def choose_way(
    parameters: Parameters,
    comm: Communicator,
    transport: str,
    hierarchical: bool | str,
    *,
    codec: Codec | None = None,
    lossless: bool = True,
) -> Way:
    """
    Args:
        parameters: whose gradient is to be exchanged.
        transport: "collective", "pipelined", or "auto": the one that is faster in a few exchanges,
            and for a short vector the collectives; or "nccl", never chosen by itself.
        hierarchical: see `routes_for`, and for "nccl" `start_nccl`.
        codec: with which to try.
        lossless: whether nothing is ever lost on the way.

    Raises:
        SharedError: options that contradict each other; and see `start_nccl`.

    Collective. The same on all ranks. Cost: where it has to measure, some tenths of a second.
    """
    if transport == "nccl":
        routes, nccl = start_nccl(parameters, comm, hierarchical, lossless=lossless)
        return Way("nccl", routes, {}, nccl=nccl)
    if transport == "collective":
        if hierarchical is True:
            raise SharedError(
                "hierarchical=True needs transport='pipelined', 'nccl' or 'auto', not 'collective'"
            )
        hierarchical = False
    routes = routes_for(comm.hosts, hierarchical)
    if routes.hierarchical:
        return Way("pipelined", routes, {})
    way = Way("collective" if transport == "auto" else transport, routes, {})
    if transport != "auto" or comm.size == 1 or parameters.flat.size < SHORT:
        return way
    values, seconds = SHORT, try_transports(comm, SHORT, codec, rounds=2)
    faster = min(seconds.values())
    values = int(min(parameters.flat.size, SHORT * max(1.0, TRIED_S / faster)))
    if values > 2 * SHORT:
        seconds = try_transports(comm, values, codec, rounds=2)
    else:
        values = SHORT
    return replace(
        way, transport=min(seconds, key=lambda name: seconds[name]), seconds=seconds, values=values
    )


def choose_bits(
    buckets: Sequence[Bucket],
    parameters: Parameters,
    comm: Communicator,
    routes: Routes,
    block_size: int,
) -> tuple[dict[str, int], Measured | None]:
    """The bits of each bucket that should take the least time, by its number; and what says so.

    Collective. The same on all ranks. Cost: some tenths of a second for the links and the kernels;
    nothing, and nothing is measured, for one rank, and where only 32 bits are possible.
    """
    if parameters.dtype != np.float32 or comm.size == 1:
        return {str(number): 32 for number in range(len(buckets))}, None
    measured = measure(comm, routes, block_size, parameters.flat)
    bits = {
        str(number): measured.best_bits(bucket.values.stop - bucket.values.start)
        for number, bucket in enumerate(buckets)
    }
    return bits, measured


def measure(
    comm: Communicator, routes: Routes, block_size: int = 1024, like: Array | None = None
) -> Measured:
    """Measure links, and the kernels for arrays that are where `like` is (NumPy's if not given).

    Collective; the same on all ranks. Cost: as `choose_bits`.
    """
    link = measure_link(comm, routes)
    speeds = measure_kernel_speeds(block_size, like=like)
    first: KernelSpeeds = comm.allgather_object(speeds)[0]  # ranks measure differently
    local = min(map(len, routes.hosts))
    return Measured(local * len(routes.hosts), local, link, first)


def try_transports(
    comm: Communicator,
    values: int,
    codec: Codec | None = None,
    *,
    rounds: int,
    routes: Routes | None = None,
) -> dict[str, float]:
    """What exchanges of so many float32 take, by transport.

    Args:
        rounds: of which the best counts, beside a first one that does not.
        routes: of the pipeline; every rank by itself if not given.
    Returns:
        Seconds of the slowest rank.

    Collective; the same on all ranks.
    """
    parameters = Parameters({"x": np.zeros(values, np.float32)})
    best: dict[str, float] = {}
    exchanges = {
        "pipelined": Exchange(parameters, comm, codec, transport="pipelined", routes=routes),
        "collective": Exchange(parameters, comm, codec, transport="collective"),
    }
    lost = {
        name: None if codec is None else each.residuals(parameters)
        for name, each in exchanges.items()
    }
    for attempt in range(rounds + 1):
        for name, exchange in exchanges.items():
            comm.barrier()
            begin = time.perf_counter()
            exchange.sum(parameters.flat, lost[name])
            seconds = max(comm.allgather_object(time.perf_counter() - begin))
            if attempt > 0:
                best[name] = min(seconds, best.get(name, seconds))
    return best
