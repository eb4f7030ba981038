"""The communicator over MPI whose ranks survive each other."""

from __future__ import annotations

from mpi4py import MPI

from ..job_environment import requested_spares
from ..liveness.children import end_with_this_process
from ..liveness.finish import Calls, call_last
from ..liveness.heartbeat import own
from ..liveness.watchdog import Watchdog
from ..mpi.communicator import MpiCommunicator, begin
from .membership import Lobby
from .replay_log import WithPrologue

_world: SurvivingCommunicator | None = None


def surviving_world(*, timeout_s: float, cuda_aware: bool) -> MpiCommunicator:
    """The ranks that train. A rank in reserve returns as it joins them, or ends here.

    There is one such communicator in a process; what later calls give is made from it, and does not
    survive by itself.
    """
    global _world
    if _world is not None:
        return _world.duplicate()
    watched = begin(timeout_s)
    watched.survives = True
    end_with_this_process()
    with watched("Communicator.world()"):
        lobby = Lobby(MPI.COMM_WORLD, requested_spares(), watched)
        own.meet(MPI.COMM_WORLD, timeout_s)
    call_last(lobby.leave)
    comm = lobby.first_group()
    _world = SurvivingCommunicator(comm, watched, lobby, cuda_aware=cuda_aware)
    if lobby.generation:
        _world.join()
    return _world


class SurvivingCommunicator(WithPrologue, MpiCommunicator):
    """Ranks that go on where some of them have died.

    Args:
        comm: of the ranks that train.
        watched: bounds every wait.
        lobby: where they meet again.
        cuda_aware: hand CuPy arrays to MPI.
    """

    survives = True

    def __init__(
        self, comm: MPI.Intracomm, watched: Watchdog, lobby: Lobby, *, cuda_aware: bool = False
    ) -> None:
        MpiCommunicator.__init__(self, comm, watched, _calls(lobby), cuda_aware=cuda_aware)
        WithPrologue.__init__(self, reserve=lobby.has_reserve, joins=lobby.generation > 0)
        self._lobby, self.generation = lobby, lobby.generation
        self._abandoned: list[MPI.Intracomm] = []  # a message may yet come in

    @property
    def spares(self) -> int:
        return min(self._lobby.group.spares, self._lobby.wanted - self.size)

    @property
    def lost_ranks(self) -> tuple[int, ...]:
        return tuple(self._lobby.lost)

    def revoke(self) -> None:
        for member in (self, *self._family):
            comm = member._comm
            if isinstance(comm, MPI.Intracomm) and not comm.Is_revoked():
                comm.Revoke()
        self._lobby.revoke()

    def regroup(self, *, grows: bool) -> None:
        comm = self._lobby.regroup(grows=grows)
        assert comm is not None, "who trains goes on to do so"
        self._abandoned.append(self._comm)
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self._calls = _calls(self._lobby)
        self._wait = self._watched("", self._calls)
        self._hosts, self.generation = None, self._lobby.generation
        self._family.clear()
        self._share_prologue()


def _calls(lobby: Lobby) -> Calls:
    return Calls(f"group {lobby.generation}", lobby.group.ranks)
