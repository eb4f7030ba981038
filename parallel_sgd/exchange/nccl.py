"""Sums over GPUs by NCCL: over all ranks, or within each host before exchanging between hosts.

Within a host, NCCL sums the vectors of the host's ranks. The rank at place p of a host then takes
the pieces whose owners are at place p of their hosts, and exchanges these with the ranks at place p
of the other hosts, with the same arithmetic as every exchange. Finally NCCL broadcasts the results
within each host. If no codec loses anything, and unless hosts are requested, a single NCCL
all-reduce over all ranks does everything.

NCCL adds in an order of its own. Sums equal those of the MPI transports up to rounding, and repeat
if NCCL repeats. All ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..communication import Communicator
from ..communication.cuda.nccl import Nccl, require_gpus
from ..errors import SharedError
from ..parameters import Parameters
from .layout import Topology
from .pipeline import Pipelined
from .reduction import PlainReduction
from .residuals import Residuals
from .transport import IsReady, ReductionsOver, Transport

Array = Any  #: a CuPy array, contiguous and one-dimensional


class WithNccl(Transport):
    """Sums within hosts by NCCL, and between hosts by pieces.

    Args:
        reductions: see `Transport`.
        topology: over hosts. If NCCL sums within hosts, all hosts must have equally many ranks.
        comm: the ranks.
        nccl: over all ranks, or over the ranks of this host.

    Creation is local. NCCL's bytes are counted as those of a ring.
    """

    def __init__(
        self, reductions: ReductionsOver, topology: Topology, comm: Communicator, *, nccl: Nccl
    ) -> None:
        self._comm, self._nccl = comm, nccl
        all_ranks = nccl.size == comm.size  # in one group; else a group for each host
        groups = Topology.over([0] * comm.size) if all_ranks else topology
        places = {rank: place for group in groups.hosts for place, rank in enumerate(group)}
        self._place = place = places[comm.rank]
        at_place = Topology(tuple((group[place],) for group in groups.hosts), groups.host_of)
        self._between = Pipelined(reductions, at_place, comm)
        self.reductions = self._between.reductions
        plain = all(isinstance(reduction, PlainReduction) for reduction in self.reductions)
        self._alone = len(groups.hosts) == 1 and plain
        #: For each bucket, the non-empty stripes with the places of their owners.
        self._stripes = [
            [
                (stripe.values, places[owner])
                for owner, stripe in enumerate(reduction.stripes)
                if stripe.values.stop > stripe.values.start
            ]
            for reduction in self.reductions
        ]

    def sum(self, vector: Array, residuals: Residuals | None, is_ready: IsReady | None) -> int:
        """See `Transport`."""
        bytes_sent = 0

        def is_summed(bucket: int) -> bool:
            nonlocal bytes_sent
            if is_ready is not None and not is_ready(bucket):
                return False
            bytes_sent += self._sum_within(bucket, vector, residuals)
            return True

        if self._alone:
            waiting = self._between.messages.backoff()
            for bucket in range(len(self.reductions)):
                # bounded: for this rank's own backward
                while not is_summed(bucket):  # this rank's own gradient is not ready
                    waiting.pause()
            return bytes_sent
        bytes_sent += self._between.sum(vector, residuals, is_summed)
        if self._nccl.size > 1:
            bytes_sent += sum(self._broadcast_results(stripes, vector) for stripes in self._stripes)
        return bytes_sent

    def _sum_within(self, bucket: int, vector: Array, residuals: Residuals | None) -> int:
        """Sum a bucket over the ranks of this host. Return the bytes sent by this rank."""
        if residuals is not None:
            for stripe, place in self._stripes[bucket]:
                if place != self._place:
                    residuals.give_non_owned(stripe, vector)
        size, values = self._nccl.size, vector[self.reductions[bucket].values]
        if size == 1:
            return 0
        with self._comm.trace.span("wire"):
            self._nccl.all_reduce(values)
        sent: int = 2 * (size - 1) * values.nbytes // size
        return sent

    def _broadcast_results(self, stripes: Sequence[tuple[slice, int]], vector: Array) -> int:
        """Broadcast results within this host. Return the bytes of this rank's own results."""
        with self._comm.trace.span("wire"):
            self._nccl.broadcast_all([(vector[values], place) for values, place in stripes])
        own = (values for values, place in stripes if place == self._place)
        sent: int = sum(values.stop - values.start for values in own) * vector.itemsize
        return sent


def start_nccl(
    parameters: Parameters, comm: Communicator, hierarchical: bool | str, *, lossless: bool
) -> tuple[Topology, Nccl]:
    """Create the NCCL communicator, over the ranks of this host or over all ranks.

    Args:
        parameters: on this rank's GPU.
        comm: the ranks.
        hierarchical: "auto" sums within hosts if a codec is lossy, and over all ranks otherwise.
        lossless: True if no codec ever loses anything.
    Returns:
        The topology of the exchange, and the NCCL communicator.
    Raises:
        SharedError: the options contradict each other, hosts have different numbers of ranks, or
            NCCL's requirements are not met.

    Collective.
    """
    if not lossless and hierarchical is False:
        raise SharedError(
            "hierarchical=False must be True or 'auto' with transport='nccl' and fewer than 32 "
            "bits: NCCL sums within hosts, and only messages between hosts are compressed"
        )
    require_gpus(parameters.flat, comm)
    if lossless and hierarchical is not True:
        return Topology.flat(comm.size), Nccl(comm, parameters.flat)
    topology = Topology.over(comm.hosts)
    names = [comm.hosts[ranks[0]] for ranks in topology.hosts]
    counts = dict(zip(names, map(len, topology.hosts), strict=True))
    if len(set(counts.values())) > 1:
        most, fewest = max(names, key=counts.__getitem__), min(names, key=counts.__getitem__)
        raise SharedError(
            "transport='nccl' needs the same number of ranks on every host to exchange between "
            f"hosts, but {most} has {counts[most]} and {fewest} has {counts[fewest]}"
        )
    group = comm.split(topology.host_of[comm.rank])
    return topology, Nccl(group, parameters.flat, own=True)
