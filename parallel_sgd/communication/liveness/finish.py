"""The finish protocol: end the waits for ranks whose programs have finished.

A program may finish on a rank long before the remaining ranks, if no rank needs it any more. So
each rank reports, as it finishes, its number of entered collectives on each communicator. A rank
waiting in a later collective then waits for a rank that will not come. MPI alone would not end such
a wait: the finished rank is waiting in MPI_Finalize.

    every rank, as it finishes    -> rank 0       its collective counts
    rank 0, periodically          -> all running  finished ranks, with their counts
    rank 0, after the last rank   -> all ranks    all finished: continue to MPI_Finalize

Cost: two messages per rank in a job with all ranks finishing at once. Everything here is local.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..backoff import Backoff
from .abort import running_mpi
from .rank_process import is_rank
from .rank_status import Status, limit_finalize_time, report_status

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 1
_FORWARDED_EVERY_S = 1.0  #: interval between two forwards by rank 0
ON_ITS_WAY_S = 2.0  #: longest time in flight of a message from a finished rank
_LONGEST_SLEEP_S = 0.02  #: longest sleep of a finished rank between two checks

Sent = tuple["MPI.Request", bytes]
"""A pending send of a small message, and its buffer."""

CollectiveCounts = Mapping[str, int]  #: number of collectives entered, by name of the communicator


@dataclass(eq=False, slots=True)
class CollectiveCounter:
    """Counts the collectives entered by this rank on a communicator.

    Attributes:
        name: unique name of the communicator, the same on all of its ranks.
        ranks: world ranks, in the order of the communicator.
        collective_counts: collectives entered so far.
        made: communicators derived so far.
    """

    name: str
    ranks: tuple[int, ...]
    collective_counts: int = 0
    made: int = field(default=0, repr=False)

    def enter(self) -> None:
        """Count the start of a collective."""
        self.collective_counts += 1

    def child(self, ranks: tuple[int, ...], group: int = 0) -> CollectiveCounter:
        """Return the counter of a communicator derived from this communicator.

        Called on all of its ranks together.

        Args:
            ranks: world ranks of the derived communicator.
            group: number of the group, as given to `split`.
        """
        self.made += 1
        ranks = self.ranks if ranks == self.ranks else ranks  # share: there may be thousands
        return CollectiveCounter(f"{self.name}/{self.made}.{group}", ranks)


class FinishProtocol:
    """Reports this rank's finish to all ranks, and records finished ranks.

    Args:
        comm: communicator of all ranks, used only for these messages.

    May be used from any thread, if MPI supports threads.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._rank, self._size = comm, comm.rank, comm.size
        # Never removed: other ranks may still wait in a communicator already closed here.
        self._counters: dict[str, CollectiveCounter] = {}
        self._finished: dict[int, CollectiveCounts] = {}
        self._forwarded: set[int] = set()  # finished ranks already forwarded by rank 0
        self._forwarded_s = 0.0
        self._released = False
        self._sending: list[tuple[MPI.Request, Any]] = []
        self._using = threading.RLock()
        self._done, self.process = False, os.getpid()
        #: Called often, while this finished rank waits, with the awaited ranks.
        self.on_wait: Callable[[Collection[int]], object] = lambda ranks: None

    def register(self, counter: CollectiveCounter) -> CollectiveCounter:
        """Include a counter in this rank's finish report."""
        self._counters[counter.name] = counter
        return counter

    def collective_counts(self, name: str) -> int | None:
        """Return the collectives entered on the named communicator; None if unknown here."""
        return self._counters[name].collective_counts if name in self._counters else None

    def with_comm(self, exchange: Callable[[MPI.Intracomm], object]) -> None:
        """Call `exchange` with the communicator, unless this rank has finished.

        For messages with different tags.
        """
        with self._using:
            if not self._done:
                exchange(self._comm)

    def check_messages(self) -> None:
        """Receive reports of finished ranks. Rank 0 also forwards the reports."""
        with self._using:
            if self._done:
                return
            for reports in received(self._comm, _TAG):
                self._released |= reports is None
                self._finished |= reports or {}
            if self._rank == 0 and time.monotonic() - self._forwarded_s > _FORWARDED_EVERY_S:
                self._forward()

    def _forward(self) -> None:
        """Send newly finished ranks to the ranks still running."""
        self._forwarded_s = time.monotonic()
        new = {rank: self._finished[rank] for rank in self._finished.keys() - self._forwarded}
        if not new:
            return
        self._forwarded |= new.keys()
        for rank in range(1, self._size):
            if rank not in self._finished:
                self._send(rank, new)

    def _send(self, rank: int, reports: Mapping[int, CollectiveCounts] | None) -> None:
        self._sending.append(post(self._comm, reports, rank, _TAG))

    def has_finished(self, rank: int) -> bool:
        """Return True if a world rank is known to have finished."""
        return rank in self._finished

    def missing(self, counter: CollectiveCounter, number: int) -> list[int]:
        """Return the world ranks that finished before entering `number` of these collectives."""
        finished = [rank for rank in counter.ranks if self.has_finished(rank)]
        return [rank for rank in finished if self._finished[rank].get(counter.name, 0) < number]

    @property
    def all_finished(self) -> bool:
        """True once all ranks have finished."""
        return self._done

    def leave(self) -> None:
        """Report that this rank has finished, and wait until all ranks have.

        The remaining ranks may continue for any time. Calling it again does nothing.
        """
        from mpi4py import MPI

        if self._done or os.getpid() != self.process or MPI.Is_finalized():
            return
        counts = {name: counter.collective_counts for name, counter in self._counters.items()}
        with self._using:
            self._finished[self._rank] = counts
            if self._rank:
                self._send(0, {self._rank: counts})
        backoff = Backoff(time.sleep, first_s=1e-4, growth=2, longest_s=_LONGEST_SLEEP_S)
        # bounded: FinishWait ends it
        while not (len(self._finished) == self._size if self._rank == 0 else self._released):
            backoff.pause()
            self.check_messages()
            self.on_wait([0] if self._rank else set(range(self._size)) - self._finished.keys())
        with self._using:
            for rank in range(1, self._size) if self._rank == 0 else ():
                self._send(rank, None)
            # bounded: short messages, sent without a receiver
            MPI.Request.Waitall([request for request, _ in self._sending])
            self._done = True


_protocol: FinishProtocol | None = None
_key: int | None = None  # attribute of COMM_SELF; its deletion reports a call of MPI.Finalize
_called_last: list[Callable[[], object]] = []


def finish_protocol(world: MPI.Intracomm) -> FinishProtocol:
    """Return the finish protocol of this process's world. Collective at its first call."""
    global _protocol, _key
    if _protocol is None:
        from mpi4py import MPI

        # bounded: in mpi_world's watched(Communicator.world())
        _protocol = FinishProtocol(world.Dup())
        # For programs that call MPI.Finalize themselves: it deletes COMM_SELF's attributes first.
        _key = MPI.Comm.Create_keyval(delete_fn=lambda *_: _leave())
        MPI.COMM_SELF.Set_attr(_key, True)
    return _protocol


def call_last(function: Callable[[], object]) -> None:
    """Register a function to call when this program has finished, after all of this package."""
    _called_last.append(function)


def check_messages() -> None:
    """Receive reports of finished ranks, if this process uses the finish protocol.

    Call periodically, also while this rank does not wait: rank 0 forwards the reports.
    """
    if _protocol is not None:
        _protocol.check_messages()


def _leave() -> None:
    """Finish this process, after all background tasks of this package."""
    if not is_rank():  # a child process of a rank
        return
    if _protocol is not None:
        _protocol.leave()
        if _protocol.all_finished:
            report_status(Status.ALL_FINISHED)
    for function in _called_last:
        function()
    report_status(Status.FINISHED)


@atexit.register  # registered first in this package, so called last
def _end() -> None:
    """Finish, as `_leave`, then shut down MPI for all ranks, without later Python callbacks."""
    _leave()
    if _protocol is not None and is_rank():
        limit_finalize_time()
        mpi = running_mpi()
        if mpi is not None and _key is not None:
            mpi.COMM_SELF.Delete_attr(_key)


def finalize_at_exit() -> None:
    """Finalize MPI as this process ends: after all exit handlers, since the user's may use MPI.

    For a process that has initialized MPI itself.
    """
    # Python clears sys last, after all exit handlers and all other modules.
    vars(sys)["_parallel_sgd_finalizer"] = _Finalizer()


class _Finalizer:
    """Finalizes MPI on deletion, except in a forked process, which would wait for all ranks.

    No module is accessible by then.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = SimpleNamespace(Finalize=MPI.Finalize, Is_finalized=MPI.Is_finalized)
        self._process, self._this_process = os.getpid(), os.getpid

    def __del__(self) -> None:
        if self._this_process() == self._process and not self._mpi.Is_finalized():
            # bounded: limit_finalize_time
            self._mpi.Finalize()


def post(comm: MPI.Intracomm, item: Any, rank: int, tag: int) -> Sent:
    """Begin to send a value (see `serialization`)."""
    from ..serialization import packed  # imported here: a launcher does not need NumPy

    data = packed(item)
    return comm.Isend(data, rank, tag), data


def received(comm: MPI.Intracomm, tag: int) -> list[Any]:
    """Return the values received with a tag so far."""
    from mpi4py import MPI

    from ..serialization import unpacked

    items, status = [], MPI.Status()
    while (message := comm.Improbe(tag=tag, status=status)) is not None:
        data = bytearray(status.Get_count(MPI.BYTE))
        # bounded: it is here, and short: it came whole
        message.Recv(data)
        items.append(unpacked(data))
    return items
