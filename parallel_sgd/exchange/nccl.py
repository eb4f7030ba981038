"""Sums over GPUs by NCCL: of all ranks, or of those of each host, which then send one message.

Within a host NCCL sums what its ranks have. Of that sum every rank takes the pieces whose owners
are at its place, and exchanges them with the ranks at the same place on the other hosts, with the
arithmetic of every exchange; then NCCL brings the results to all ranks of the host. Where nothing
is lost on the way, and unless hosts are asked for, one all-reduce of NCCL does it all.

NCCL adds in an order of its own: sums equal those of other transports to rounding, and repeat
where NCCL repeats. All ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..communication import Communicator
from ..communication.mpi.nccl import Nccl, require_gpus
from ..errors import SharedError
from ..parameters import Parameters
from .layout import Topology
from .pipeline import Pipelined
from .reduction import PlainReduction
from .residuals import Residuals
from .transport import IsReady, ReductionsOver, Transport

Array = Any  #: a CuPy array, contiguous and one-dimensional


class WithNccl(Transport):
    """Sums within hosts by NCCL, and between them by pieces.

    Args:
        topology: over hosts, of as many ranks each if NCCL sums within hosts.
        nccl: over all ranks, or those of this host.

    Creation is local. Of NCCL's bytes as many are counted as it sends in rings.
    """

    def __init__(
        self, reductions: ReductionsOver, topology: Topology, comm: Communicator, *, nccl: Nccl
    ) -> None:
        self._comm, self._nccl = comm, nccl
        all_ranks = nccl.size == comm.size  # are one group, or those of each host
        groups = Topology.over([0] * comm.size) if all_ranks else topology
        places = {rank: place for group in groups.hosts for place, rank in enumerate(group)}
        self._place = place = places[comm.rank]
        at_place = Topology(tuple((group[place],) for group in groups.hosts), groups.host_of)
        self._between = Pipelined(reductions, at_place, comm)
        self.reductions = self._between.reductions
        plain = all(isinstance(reduction, PlainReduction) for reduction in self.reductions)
        self._alone = len(groups.hosts) == 1 and plain
        #: By bucket: the stripes, each with the place of its owner.
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
                while not is_summed(bucket):  # it is this rank that is late
                    waiting.pause()
            return bytes_sent
        bytes_sent += self._between.sum(vector, residuals, is_summed)
        if self._nccl.size > 1:
            bytes_sent += sum(self._broadcast_results(stripes, vector) for stripes in self._stripes)
        return bytes_sent

    def _sum_within(self, bucket: int, vector: Array, residuals: Residuals | None) -> int:
        """Over the ranks of this host; the bytes that this one sends."""
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
        """Bring results to all ranks of this host; the bytes of those that this one has."""
        with self._comm.trace.span("wire"):
            self._nccl.broadcast_all([(vector[values], place) for values, place in stripes])
        own = (values for values, place in stripes if place == self._place)
        sent: int = sum(values.stop - values.start for values in own) * vector.itemsize
        return sent


def start_nccl(
    parameters: Parameters, comm: Communicator, hierarchical: bool | str, *, lossless: bool
) -> tuple[Topology, Nccl]:
    """Which ranks sum among themselves before they send, and NCCL over these, or over all.

    Args:
        parameters: on this rank's GPU.
        hierarchical: "auto" goes by hosts where something is lost on the way.
        lossless: whether nothing ever is.
    Raises:
        SharedError: what NCCL needs is not here.

    Collective.
    """
    if not lossless and hierarchical is False:
        raise SharedError(
            "hierarchical=False must be True or 'auto' with transport='nccl' and fewer than "
            "32 bits: NCCL sums within hosts, and bits are saved between them"
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
            "transport='nccl' needs as many ranks on every host to exchange between hosts, but "
            f"{most} has {counts[most]} and {fewest} has {counts[fewest]}"
        )
    group = comm.split(topology.host_of[comm.rank])
    return topology, Nccl(group, parameters.flat, own=True)
