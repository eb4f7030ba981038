"""Who has left: a rank whose program has ended is waited for in vain.

A program may end on one rank long before it does on the others, if nobody waits for it any more. So
each rank tells, as it ends, how many collectives it has entered on each communicator. Whoever waits
in a later one then waits for a rank that will not come. MPI alone would not end such a wait: the
rank that has left is in MPI_Finalize, and waits too.

    every rank, at its end      -> rank 0     what it has entered
    rank 0, now and then        -> the rest   who has left so far, with what they had entered
    rank 0, after the last one  -> all        that all have left: go on to MPI_Finalize

A job that ends everywhere at once costs two messages a rank. Everything here is local.
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
from . import mail
from .abort import running_mpi
from .rank_process import is_rank
from .rank_status import FINISHED, limit_finalize_time, report_all_finished, report_end

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 1
_FORWARDED_EVERY_S = 1.0  #: by rank 0, if there is anything new
ON_ITS_WAY_S = 2.0  #: a message of a rank that has left may be for so long
_LONGEST_SLEEP_S = 0.02  #: of a rank that has left, between two looks

Entered = Mapping[str, int]  #: collectives on a communicator, by its name


@dataclass(eq=False, slots=True)
class CollectiveCounter:
    """The collectives that this rank has entered on one communicator.

    Attributes:
        name: the same on all of its ranks, and no other's.
        ranks: of the world, in the order of the communicator's.
        entered: so many, so far.
        made: communicators made from it, so far.
    """

    name: str
    ranks: tuple[int, ...]
    collective_counts: int = 0
    made: int = field(default=0, repr=False)

    def enter(self) -> None:
        """Another one begins."""
        self.collective_counts += 1

    def child(self, ranks: tuple[int, ...], group: int = 0) -> CollectiveCounter:
        """Those of a communicator that is made from this one, by all of its ranks together."""
        self.made += 1
        ranks = self.ranks if ranks == self.ranks else ranks  # there may be thousands of these
        return CollectiveCounter(f"{self.name}/{self.made}.{group}", ranks)


class FinishProtocol:
    """Tells the other ranks that this one leaves, and keeps who has.

    Args:
        comm: of all ranks, for these messages alone.

    It may be asked from any thread, if MPI allows that.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._rank, self._size = comm, comm.rank, comm.size
        # For good: others may yet wait in a communicator that is closed here, or forgotten.
        self._counters: dict[str, CollectiveCounter] = {}
        self._left: dict[int, Entered] = {}
        self._forwarded: set[int] = set()  # of whom rank 0 has told the rest
        self._forwarded_s = 0.0
        self._released = False
        self._sending: list[tuple[MPI.Request, Any]] = []
        self._using = threading.RLock()
        self._over, self.process = False, os.getpid()
        #: Called often with the ranks that this one waits for at its end.
        self.on_wait: Callable[[Collection[int]], object] = lambda ranks: None

    def register(self, counter: CollectiveCounter) -> CollectiveCounter:
        """Tell of these, too, at the end."""
        self._counters[counter.name] = counter
        return counter

    def collective_counts(self, name: str) -> int | None:
        """How many of the calls of that name this rank has entered; None: it knows of none."""
        return self._counters[name].collective_counts if name in self._counters else None

    def with_comm(self, exchange: Callable[[MPI.Intracomm], object]) -> None:
        """Let messages with other tags be exchanged, unless this rank has come to its end."""
        with self._using:
            if not self._over:
                exchange(self._comm)

    def check_messages(self) -> None:
        """Take in who has left by now, and pass it on where that is this rank's to do."""
        with self._using:
            if self._over:
                return
            for news in mail.received(self._comm, _TAG):
                self._released |= news is None
                self._left |= news or {}
            if self._rank == 0 and time.monotonic() - self._forwarded_s > _FORWARDED_EVERY_S:
                self._forward()

    def _forward(self) -> None:
        """Let the ranks that are still there know who is not."""
        self._forwarded_s = time.monotonic()
        new = {rank: self._left[rank] for rank in self._left.keys() - self._forwarded}
        if not new:
            return
        self._forwarded |= new.keys()
        for rank in range(1, self._size):
            if rank not in self._left:
                self._send(rank, new)

    def _send(self, rank: int, news: Mapping[int, Entered] | None) -> None:
        self._sending.append(mail.post(self._comm, news, rank, _TAG))

    def has_finished(self, rank: int) -> bool:
        """Whether a rank of the world is known to have left."""
        return rank in self._left

    def missing(self, counter: CollectiveCounter, number: int) -> list[int]:
        """The ranks of the world that have left before they entered so many of these calls."""
        gone = [rank for rank in counter.ranks if self.has_finished(rank)]
        return [rank for rank in gone if self._left[rank].get(counter.name, 0) < number]

    @property
    def all_finished(self) -> bool:
        """Whether all ranks have come to their end."""
        return self._over

    def leave(self) -> None:
        """Tell that this rank has come to its end, and wait until all have.

        They may go on for as long as they like, without this rank. Calling it again does nothing.
        """
        from mpi4py import MPI

        if self._over or os.getpid() != self.process or MPI.Is_finalized():
            return
        own = {name: counter.collective_counts for name, counter in self._counters.items()}
        with self._using:
            self._left[self._rank] = own
            if self._rank:
                self._send(0, {self._rank: own})
        backoff = Backoff(time.sleep, first_s=1e-4, growth=2, longest_s=_LONGEST_SLEEP_S)
        while not (len(self._left) == self._size if self._rank == 0 else self._released):
            backoff.pause()
            self.check_messages()
            self.on_wait([0] if self._rank else set(range(self._size)) - self._left.keys())
        with self._using:
            for rank in range(1, self._size) if self._rank == 0 else ():
                self._send(rank, None)
            MPI.Request.Waitall([request for request, _ in self._sending])
            self._over = True


_of_the_world: FinishProtocol | None = None
_key: int | None = None  # of what tells of the end where a program calls MPI.Finalize
_last: list[Callable[[], object]] = []


def finish_protocol(world: MPI.Intracomm) -> FinishProtocol:
    """Those of all ranks of this process's world. Collective at its first call."""
    global _of_the_world, _key
    if _of_the_world is None:
        from mpi4py import MPI

        _of_the_world = FinishProtocol(world.Dup())
        # Also for programs that call MPI.Finalize: it first deletes what COMM_SELF has.
        _key = MPI.Comm.Create_keyval(delete_fn=lambda *_: _leave())
        MPI.COMM_SELF.Set_attr(_key, True)
    return _of_the_world


def call_last(function: Callable[[], object]) -> None:
    """Call it when this program has come to its end, after all else of this package."""
    _last.append(function)


def check_messages() -> None:
    """Take in who has left by now, where this process's ranks tell each other. To be called now
    and then, also where this rank waits for nobody: rank 0 passes it on to the others."""
    if _of_the_world is not None:
        _of_the_world.check_messages()


def _leave() -> None:
    """This process ends, with nothing of ours in the background any more."""
    if not is_rank():  # but a child of it
        return
    if _of_the_world is not None:
        _of_the_world.leave()
        if _of_the_world.all_finished:
            report_all_finished()
    for function in _last:
        function()
    report_end(FINISHED)


@atexit.register  # before any other of this package, so that it is called after them
def _end() -> None:
    """As above. MPI is shut down, which takes all ranks, when there is no Python any more that
    could be called back."""
    _leave()
    if _of_the_world is not None and is_rank():
        limit_finalize_time()
        mpi = running_mpi()
        if mpi is not None and _key is not None:
            mpi.COMM_SELF.Delete_attr(_key)


def finalize_at_exit() -> None:
    """MPI, which this process has initialized and nobody else finalizes, is finalized as it ends:
    after all exit handlers, since the user's own may yet use MPI."""
    # Python clears this module last, when it has called the handlers and cleared the others.
    vars(sys)["_parallel_sgd_finalizer"] = _Finalizer()


class _Finalizer:
    """Finalizes MPI when it goes; in a process that was forked, which would wait there for the
    other ranks, it does not. By then no module can be looked into."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = SimpleNamespace(Finalize=MPI.Finalize, Is_finalized=MPI.Is_finalized)
        self._process, self._this_process = os.getpid(), os.getpid

    def __del__(self) -> None:
        if self._this_process() == self._process and not self._mpi.Is_finalized():
            self._mpi.Finalize()
