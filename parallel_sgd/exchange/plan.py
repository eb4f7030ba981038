"""The plan of an exchange: transport, topology and bits, chosen by measurements before training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import runtime
from ..communication import Communicator
from ..communication.cuda.nccl import Nccl
from ..compression import Codec
from ..costs import Measured, measure
from ..errors import SharedError
from ..parameters import Parameters
from .exchange import Exchange
from .layout import Bucket, Topology, topology_for
from .nccl import start_nccl

SHORT_VECTOR = 1 << 16
"""Values. Shorter vectors take the MPI collectives without a trial, if the topology is flat."""
TRIAL_S = 0.1  #: target duration of the exchanges that compare transports
MOST_TRIAL_VALUES = 1 << 24
"""Values of a trial exchange. If this many take less than `TRIAL_S`, the time per value is the same
for longer vectors. So a trial needs at most 64 MiB and the buffers of both transports."""
CLEARLY_FASTER = 0.9
"""The collectives are chosen if they take less than this fraction of the pipeline's time. On a
network link they fall behind as vectors grow: 1.0 times the pipeline's time for exchanges of 0.1 s,
1.7 times for 0.7 s. The margin keeps noise from deciding."""


@dataclass(frozen=True)
class ExchangePlan:
    """The transport and topology chosen for an exchange, with the measurements behind the choice.

    Attributes:
        transport: see `Exchange`.
        topology: see `Exchange`.
        seconds: the time of an exchange of `values` float32, by transport; empty if nothing was
            measured.
        values: the number of values in the measured exchanges.
        nccl: see `Exchange`.
    """

    transport: str
    topology: Topology
    seconds: dict[str, float]
    values: int = 0
    nccl: Nccl | None = None

    @property
    def choice(self) -> dict[str, Any] | None:
        """The result of the trial as plain values; None if nothing was measured."""
        chosen = {"transport": self.transport, "seconds": self.seconds, "values": self.values}
        return chosen if self.seconds else None

    def of_subset(self, ranks: int) -> ExchangePlan:
        """Return the plan of an exchange over some of the ranks: each sends for itself. Local."""
        transport = "pipelined" if self.transport == "nccl" else self.transport
        return ExchangePlan(transport, Topology.flat(ranks), {})

    def close(self) -> None:
        """Release NCCL's resources. Collective."""
        if self.nccl is not None:
            self.nccl.close()

    def __str__(self) -> str:
        topology = self.topology
        ranks, hosts = len(topology.host_of), len(topology.hosts)
        text = f"{self.transport} exchange"
        if topology.hierarchical:
            counted = f"{hosts} host{'s' * (hosts > 1)}"
            text += f", {ranks} ranks in {counted}, each summed first"
        if self.seconds:
            tried = ", ".join(f"{name} {s * 1e3:.3g} ms" for name, s in self.seconds.items())
            text += f" ({self.values} float32 tried: {tried})"
        return text

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as values for JSON."""
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
    chosen: Mapping[str, Any] | None = None,
) -> ExchangePlan:
    """Choose transport and topology for an exchange.

    Args:
        parameters: the layout of the gradient.
        comm: the ranks.
        transport: "collective", "pipelined", "nccl", or "auto". "auto" chooses "pipelined", unless
            the vector is short or "collective" is clearly faster in trial exchanges; never "nccl".
        hierarchical: see `topology_for`, and for "nccl" `start_nccl`.
        codec: used in the trial exchanges.
        lossless: True if no codec ever loses anything.
        chosen: `ExchangePlan.choice` of an earlier plan, which takes the place of a trial.
    Returns:
        The plan, the same on all ranks.
    Raises:
        SharedError: options contradict each other; and see `start_nccl`.

    Collective. Cost: some tenths of a second if a trial is needed.
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
    if chosen is not None:
        return replace(plan, **chosen)
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
    overlap: bool = False,
) -> tuple[dict[str, float], Measured | None]:
    """Choose the fastest bits for each bucket from measurements of links and kernels.

    Args:
        possible: the bits to choose from.
        overlap: True if each bucket finds a step size of its own; otherwise all share one.
    Returns:
        Bits by bucket number, and the measurements. The same on all ranks.

    Collective. Cost: some tenths of a second for measuring links and kernels. A single rank, and
    parameters other than float32, use 32 bits without measuring.
    """
    if parameters.dtype != np.float32 or comm.size == 1:
        return {str(number): 32 for number in range(len(buckets))}, None
    measured = measure(comm, topology.hosts, block_size, parameters.flat, possible)
    searches = 1 if overlap else 1 / len(buckets)
    bits = {
        str(number): measured.best_bits(bucket.values.stop - bucket.values.start, searches)
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
    """Measure the time of an exchange of `values` float32, by transport.

    Args:
        comm: the ranks.
        values: the number of values.
        codec: of the exchanges; None sends values unchanged.
        rounds: the number of measured rounds, of which the fastest counts; one warm-up round
            precedes.
        topology: for the pipeline. Default: every rank sends for itself.
    Returns:
        Seconds on the slowest rank, the same on all ranks.

    Collective.
    """
    # Random values: an entropy code would send almost nothing for zeros.
    sample = np.random.default_rng(comm.rank).standard_normal(SHORT_VECTOR, np.float32)
    parameters = Parameters({"x": np.resize(sample, values)})
    best: dict[str, float] = {}
    exchanges = {
        "pipelined": Exchange(parameters, comm, codec, transport="pipelined", topology=topology),
        "collective": Exchange(parameters, comm, codec, transport="collective"),
    }
    residuals = {
        name: None if codec is None else exchange.residuals(parameters)
        for name, exchange in exchanges.items()
    }
    for attempt in range(rounds + 1):
        for name, exchange in exchanges.items():
            comm.barrier()
            begin = runtime.perf_counter()
            exchange.sum(parameters.flat, residuals[name])
            seconds = max(comm.allgather_object(runtime.perf_counter() - begin))
            if attempt > 0:
                best[name] = min(seconds, best.get(name, seconds))
    return best
