"""The fault-tolerant communicator over MPI."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from mpi4py import MPI

from ...errors import RanksLost, UserError
from ..endpoint import Endpoint
from ..job_environment import requested_spares
from ..liveness.finish import CollectiveCounter, call_last
from ..liveness.heartbeat import own
from ..liveness.rank_process import kill_children_with_this_process
from ..liveness.watchdog import Watchdog
from ..mpi.communicator import MpiCommunicator, begin
from ..mpi.endpoint import MpiEndpoint, MpiTransfer
from .eviction import EvictingWatchdog
from .membership import Rendezvous
from .replay_log import WithReplayLog
from .retry import RankFailures

ABANDONED_S = 5.0
"""Time for pending operations to fail after their communicator is revoked, in seconds."""

_failures = RankFailures("messages")

_world: UlfmCommunicator | None = None


def ulfm_world(*, timeout_s: float, cuda_aware: bool) -> MpiCommunicator:
    """Return the training ranks. A standby rank returns when it joins, or exits here.

    A process has a single fault-tolerant communicator. Later calls return duplicates, without fault
    tolerance of their own.
    """
    global _world
    if _world is not None:
        return _world.duplicate()
    watched = begin(timeout_s, EvictingWatchdog)
    kill_children_with_this_process()
    with watched("Communicator.world()"):
        rendezvous = Rendezvous(MPI.COMM_WORLD, requested_spares(), watched)
        world = MPI.COMM_WORLD
        own.meet(world.rank, world.size, world.Bcast, world.Barrier, timeout_s)
    call_last(rendezvous.leave)
    comm = rendezvous.first_group()
    _world = UlfmCommunicator(comm, watched, rendezvous, cuda_aware=cuda_aware)
    if rendezvous.generation:
        _world.join()
    return _world


class FailureChecked:
    """Context manager for a fault-tolerant collective: raises RanksLost after any rank failure.

    MPI's own result is not enough: collectives of Open MPI have succeeded with bytes never sent.

    Cost: about a microsecond.
    """

    def __init__(
        self, comm: MPI.Intracomm, wait: AbstractContextManager[object], name: str
    ) -> None:
        self._comm, self._wait, self._name = comm, wait, name

    def __enter__(self) -> None:
        self._wait.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._wait.__exit__(kind, error, traceback)
        failed = self._comm.Get_failed()
        try:
            if failed.size or self._comm.Is_revoked():
                raise RanksLost(f"a rank has failed: found after {self._name}") from error
        finally:
            failed.Free()


class FailureCheckedCommunicator(MpiCommunicator):
    """Ranks whose collectives and messages raise `RanksLost` after any rank failure.

    Args: as `MpiCommunicator`.
    """

    def require_fixed_ranks(self, problem: str) -> None:
        raise UserError(problem)

    def _waits(self, name: str) -> AbstractContextManager[object]:
        return FailureChecked(self._comm, super()._waits(name), name)

    def _of(self, comm: MPI.Intracomm, group: int) -> MpiCommunicator:
        # Open MPI crashes if a rank revokes a communicator still being made by any rank.
        # bounded: its callers are in _waits()
        self._comm.Barrier()
        return super()._of(comm, group)

    def _part(self, comm: MPI.Intracomm, counter: CollectiveCounter) -> MpiCommunicator:
        return FailureCheckedCommunicator(comm, self._watched, counter, cuda_aware=self._cuda_aware)

    def endpoint(self, peers: Sequence[int], *, serving: bool) -> Endpoint:
        return UlfmEndpoint(self._comm, peers, serving, self._watched, self.world_ranks)


class UlfmEndpoint(MpiEndpoint):
    """Endpoint whose pending operations may be abandoned after a rank failure."""

    _failed = False  # True after a rank failure
    _pending: tuple[MpiTransfer, ...] = ()

    listen = _failures(MpiEndpoint.listen)
    receive = _failures(MpiEndpoint.receive)
    send = _failures(MpiEndpoint.send)

    def _raise_rank_failure(self, error: MPI.Exception) -> None:
        try:
            super()._raise_rank_failure(error)
        except RanksLost:
            self._failed = True
            raise

    def _track(self, transfer: MpiTransfer) -> MpiTransfer:
        self._pending = (*(pending for pending in self._pending if pending.rest), transfer)
        return transfer

    def close(self) -> None:
        if not self._failed:  # otherwise `abandon` handles pending requests
            super().close()

    def abandon(self) -> None:
        self._failed, latest = True, time.monotonic() + ABANDONED_S
        headers = [self._requests[self._places[peer]] for peer in self._listening]
        bodies = [request for transfer in self._pending for request, _ in transfer.rest]
        self._listening.clear()
        for request in [*headers, *bodies]:
            while not _has_ended(request) and time.monotonic() < latest:
                time.sleep(1e-4)


def _has_ended(request: MPI.Request) -> bool:
    """Return True if a request has completed or failed."""
    with contextlib.suppress(RanksLost), _failures:
        return bool(request.Test())
    return True


class UlfmCommunicator(WithReplayLog, FailureCheckedCommunicator):
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
        FailureCheckedCommunicator.__init__(
            self, comm, watched, _counter(rendezvous), cuda_aware=cuda_aware
        )
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
        assert comm is not None, "a training rank stays in the group"
        self._abandoned.append(self._comm)
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self._counter = _counter(self._rendezvous)
        self._wait = self._watched("", self._counter)
        self._hosts, self.generation = None, self._rendezvous.generation
        self._family.clear()
        self._share_replay_log()


def _counter(rendezvous: Rendezvous) -> CollectiveCounter:
    return CollectiveCounter(f"group {rendezvous.generation}", rendezvous.group.ranks)
