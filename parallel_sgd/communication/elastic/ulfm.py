"""The fault-tolerant communicator over MPI."""

from __future__ import annotations

from mpi4py import MPI

from ..job_environment import requested_spares
from ..liveness.children import kill_children_with_this_process
from ..liveness.finish import CollectiveCounter, call_last
from ..liveness.heartbeat import own
from ..liveness.watchdog import Watchdog
from ..mpi.communicator import MpiCommunicator, begin
from .membership import Rendezvous
from .replay_log import WithReplayLog

_world: UlfmCommunicator | None = None


def ulfm_world(*, timeout_s: float, cuda_aware: bool) -> MpiCommunicator:
    """Return the training ranks. A standby rank returns when it joins, or exits here.

    A process has a single fault-tolerant communicator. Later calls return duplicates, without fault
    tolerance of their own.
    """
    global _world
    if _world is not None:
        return _world.duplicate()
    watched = begin(timeout_s)
    watched.fault_tolerant = True
    kill_children_with_this_process()
    with watched("Communicator.world()"):
        rendezvous = Rendezvous(MPI.COMM_WORLD, requested_spares(), watched)
        own.meet(MPI.COMM_WORLD, timeout_s)
    call_last(rendezvous.leave)
    comm = rendezvous.first_group()
    _world = UlfmCommunicator(comm, watched, rendezvous, cuda_aware=cuda_aware)
    if rendezvous.generation:
        _world.join()
    return _world


class UlfmCommunicator(WithReplayLog, MpiCommunicator):
    """Ranks that continue after failures.

    Args:
        comm: communicator of the training ranks.
        watched: bounds every wait.
        rendezvous: reconfigures the ranks.
        cuda_aware: pass CuPy arrays to MPI directly.
    """

    fault_tolerant = True

    def __init__(
        self,
        comm: MPI.Intracomm,
        watched: Watchdog,
        rendezvous: Rendezvous,
        *,
        cuda_aware: bool = False,
    ) -> None:
        MpiCommunicator.__init__(self, comm, watched, _counter(rendezvous), cuda_aware=cuda_aware)
        WithReplayLog.__init__(
            self, standby=rendezvous.has_standby, joins=rendezvous.generation > 0
        )
        self._rendezvous, self.generation = rendezvous, rendezvous.generation
        self._abandoned: list[MPI.Intracomm] = []  # kept alive for messages in flight

    @property
    def spares(self) -> int:
        return min(self._rendezvous.group.spares, self._rendezvous.wanted - self.size)

    @property
    def failed_ranks(self) -> tuple[int, ...]:
        return tuple(self._rendezvous.failed_ranks)

    def revoke(self) -> None:
        for member in (self, *self._family):
            comm = member._comm
            if isinstance(comm, MPI.Intracomm) and not comm.Is_revoked():
                comm.Revoke()
        self._rendezvous.revoke()

    def _reconfigure(self, *, allow_join: bool) -> None:
        comm = self._rendezvous.reconfigure(allow_join=allow_join)
        assert comm is not None, "who trains goes on to do so"
        self._abandoned.append(self._comm)
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self._counter = _counter(self._rendezvous)
        self._wait = self._watched("", self._counter)
        self._hosts, self.generation = None, self._rendezvous.generation
        self._family.clear()
        self._share_replay_log()


def _counter(rendezvous: Rendezvous) -> CollectiveCounter:
    return CollectiveCounter(f"group {rendezvous.generation}", rendezvous.group.ranks)
