"""What an exchange goes by: decided once, before training, by the hosts and a short measurement."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..communication import Communicator
from ..communication.mpi.nccl import Nccl
from ..compression import Codec
from ..costs import Measured, measure
from ..errors import SharedError
from ..parameters import Parameters
from .exchange import Exchange
from .layout import Bucket, Topology, topology_for
from .nccl import start_nccl

SHORT_VECTOR = 1 << 16
"""Values: shorter vectors take the library's collectives untried, unless hosts add up first."""
TRIAL_S = 0.1  #: about as long may an exchange take by which transports are compared
MOST_TRIAL_VALUES = 1 << 24
"""Values: where so many need no tenth of a second, more take as long a value. So trying needs
64 MiB and the buffers of both transports, however long the vector."""
CLEARLY_FASTER = 0.9
"""Of the pipeline's seconds: the collectives are taken where they need less. On a link they fall
behind with the length (1.0 times the pipeline's after 0.1 s, 1.7 after 0.7), and noise is to tip
nothing."""


@dataclass(frozen=True)
class ExchangePlan:
    """
    Attributes:
        transport: see `Exchange`.
        topology: see `Exchange`.
        seconds: what exchanges of `values` float32 took by each transport; empty where nothing had
            to be tried.
        values: of those exchanges.
        nccl: see `Exchange`.
    """

    transport: str
    topology: Topology
    seconds: dict[str, float]
    values: int = 0
    nccl: Nccl | None = None

    def close(self) -> None:
        """Give back what NCCL has. Collective."""
        if self.nccl is not None:
            self.nccl.close()

    def __str__(self) -> str:
        topology = self.topology
        ranks, hosts = len(topology.host_of), len(topology.hosts)
        text = f"{self.transport} exchange"
        if topology.hierarchical:
            counted = f"{hosts} host{'s' * (hosts > 1)}"
            text += f", {ranks} ranks in {counted} first among themselves"
        if self.seconds:
            tried = ", ".join(f"{name} {s * 1e3:.3g} ms" for name, s in self.seconds.items())
            text += f" ({self.values} float32 tried: {tried})"
        return text

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        tried = {"values": self.values, "seconds": self.seconds} if self.seconds else None
        hierarchical = self.topology.hierarchical
        return {"transport": self.transport, "hierarchical": hierarchical, "tried": tried}


def choose_plan(
    parameters: Parameters,
    comm: Communicator,
    transport: str,
    hierarchical: bool | str,
    *,
    codec: Codec | None = None,
    lossless: bool = True,
) -> ExchangePlan:
    """
    Args:
        parameters: whose gradient is to be exchanged.
        transport: "collective", "pipelined", or "auto": the latter, unless the former is clearly
            faster in a few exchanges, or the vector is short; or "nccl", never chosen by itself.
        hierarchical: see `topology_for`, and for "nccl" `start_nccl`.
        codec: with which to try.
        lossless: whether nothing is ever lost on the way.

    Raises:
        SharedError: options that contradict each other; and see `start_nccl`.

    Collective. The same on all ranks. Cost: where it has to measure, some tenths of a second.
    """
    if transport == "nccl":
        topology, nccl = start_nccl(parameters, comm, hierarchical, lossless=lossless)
        return ExchangePlan("nccl", topology, {}, nccl=nccl)
    if transport == "collective":
        if hierarchical is True:
            raise SharedError(
                "hierarchical=True needs transport='pipelined', 'nccl' or 'auto', not 'collective'"
            )
        hierarchical = False
    topology = topology_for(comm.hosts, hierarchical)
    if topology.hierarchical:
        return ExchangePlan("pipelined", topology, {})
    plan = ExchangePlan("collective" if transport == "auto" else transport, topology, {})
    if transport != "auto" or comm.size == 1 or parameters.flat.size < SHORT_VECTOR:
        return plan
    values = SHORT_VECTOR
    while True:
        seconds = try_transports(comm, values, codec, rounds=2)
        longer = values * max(1.0, TRIAL_S / min(seconds.values()))
        longer = min(parameters.flat.size, longer, MOST_TRIAL_VALUES)
        if longer <= 2 * values:
            break
        values = int(longer)
    clearly = seconds["collective"] < CLEARLY_FASTER * seconds["pipelined"]
    faster = "collective" if clearly else "pipelined"
    return replace(plan, transport=faster, seconds=seconds, values=values)


def choose_bits(
    buckets: Sequence[Bucket],
    parameters: Parameters,
    comm: Communicator,
    topology: Topology,
    block_size: int,
    possible: Collection[float],
) -> tuple[dict[str, float], Measured | None]:
    """The bits of each bucket that should take the least time, by its number; and what says so.

    Args:
        possible: what bits may be chosen.

    Collective. The same on all ranks. Cost: some tenths of a second for the links and the kernels;
    nothing, and nothing is measured, for one rank, and where only 32 bits are possible.
    """
    if parameters.dtype != np.float32 or comm.size == 1:
        return {str(number): 32 for number in range(len(buckets))}, None
    measured = measure(comm, topology.hosts, block_size, parameters.flat, possible)
    bits = {
        str(number): measured.best_bits(bucket.values.stop - bucket.values.start)
        for number, bucket in enumerate(buckets)
    }
    return bits, measured


def try_transports(
    comm: Communicator,
    values: int,
    codec: Codec | None = None,
    *,
    rounds: int,
    topology: Topology | None = None,
) -> dict[str, float]:
    """What exchanges of so many float32 take, by transport.

    Args:
        rounds: of which the best counts, beside a first one that does not.
        topology: of the pipeline; every rank by itself if not given.
    Returns:
        Seconds of the slowest rank.

    Collective; the same on all ranks.
    """
    # Of zeros an entropy code would send nothing.
    some = np.random.default_rng(comm.rank).standard_normal(SHORT_VECTOR, np.float32)
    parameters = Parameters({"x": np.resize(some, values)})
    best: dict[str, float] = {}
    exchanges = {
        "pipelined": Exchange(parameters, comm, codec, transport="pipelined", topology=topology),
        "collective": Exchange(parameters, comm, codec, transport="collective"),
    }
    lost = {
        name: None if codec is None else exchange.residuals(parameters)
        for name, exchange in exchanges.items()
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
