"""Bounded waits: end the job when a wait times out, or is for a finished rank."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ..phrases import in_words, waiting_for_finished
from ..stderr import write_stderr
from .abort import GRACE_S, user_location
from .diagnosis import FinishWait, StatusQuery, missing_in_words, silent, stack_lines
from .finish import ON_ITS_WAY_S, CollectiveCounter, FinishProtocol, check_messages
from .heartbeat import own
from .rank_status import Status, report_status

if TYPE_CHECKING:
    from mpi4py import MPI


#: Interval between two checks of the waits, in seconds; shorter waits are not checked.
CHECK_INTERVAL_S = 0.5

#: Longest normal time between two checks. After a longer time the process was stopped, or got no
#: core. The time then counts for no wait: batch systems stop all ranks together.
_LONGEST_PAUSE_S = 3.0

#: Time for a process that ends the job to exit itself, in seconds.
_EXITS_S = 5.0

#: Delay before a rank prints its own problem: usually the other ranks arrive sooner, and all ranks
#: print it.
REPORT_PROBLEM_AFTER_S = 1.0


class Watchdog:
    """Bounds waits for other ranks: ``with watchdog("alltoall", counter): ...``, in any thread.

    A wait longer than `timeout_s` ends the job. A wait for a finished rank ends the job within
    seconds.

    Args:
        timeout_s: longest wait, in seconds, more than 0.
        rank: this rank, for messages.
        abort: ends the job on all ranks; this process exits 5 s later if that fails.
        finish_protocol: knows finished ranks; None if unknown. May be set later.

    Cost: well under a microsecond for each wait. One thread checks the waits of all watchdogs twice
    a second, from the first wait in this process on.
    """

    def __init__(
        self,
        timeout_s: float,
        rank: int,
        abort: Callable[[], object],
        finish_protocol: FinishProtocol | None = None,
    ) -> None:
        assert timeout_s > 0
        self.timeout_s, self._rank, self._abort = timeout_s, rank, abort
        self.finish_protocol = finish_protocol
        #: By world rank: time when this rank first saw that rank finished or exited.
        self._first_missing: dict[int, float] = {}

    def __call__(
        self,
        name: str,
        counter: CollectiveCounter | None = None,
        *,
        peer: int | None = None,
        problem: str | None = None,
        awaited: Callable[[], Sequence[int]] | None = None,
    ) -> Wait:
        """Return a wait, reusable for several waits in turn.

        Args:
            name: name of the operation.
            counter: collectives of the communicator, for a wait in an already counted collective.
            peer: world rank of the sender or receiver, for a wait for a message.
            problem: this rank's problem, about to be shared in this wait; printed if the other
                ranks are late.
            awaited: returns the world ranks waited for at present, if known.
        """
        if _thread is None:
            _start()
        return Wait(self, name, counter, peer, problem, awaited)

    def register(self, counter: CollectiveCounter) -> CollectiveCounter:
        """Include a counter in this rank's finish report. Local."""
        return self.finish_protocol.register(counter) if self.finish_protocol else counter

    def show_stacks(self, peer: int, why: str) -> None:
        """Make all ranks write their stacks, and print the state of a world rank. Takes a while.

        Args:
            why: the reason, as the text after "rank 3".
        """
        if _status_query is not None and self.finish_protocol is not None:
            lines = missing_in_words([peer], _status_query.query_all("", why), None)
            write_stderr(*(f"[rank {self._rank}] parallel_sgd: {line}" for line in lines))

    def has_finished(self, rank: int) -> bool:
        """Return True if a world rank is known to have finished. Local."""
        return self.finish_protocol is not None and self.finish_protocol.has_finished(rank)

    def check(self, wait: Wait, now: float) -> None:
        """End the job if this wait is too long or can never succeed."""
        if now - wait.since > self.timeout_s and self._can_continue(wait, now):
            wait.since = now
        elif now - wait.since > self.timeout_s:
            why = message(self.timeout_s, self._rank, wait.name)
            self._end(
                wait,
                [why, *self._waiting_stack(wait)],
                Status.LOST,
                partial(self._missing_ranks, wait),
            )
        elif now - wait.since < CHECK_INTERVAL_S:
            return
        elif missing := self._finished_ranks(wait, now):
            why = waiting_for_finished(missing, f"parallel_sgd: this rank waits in {wait.name}")
            place = user_location(_stack(wait))
            self._end(wait, [f"[rank {self._rank}] {why}; ending the job{place}"], Status.FAILED)
        elif now - wait.since > REPORT_PROBLEM_AFTER_S:
            self._print_problem(wait)

    def _can_continue(self, wait: Wait, now: float) -> bool:
        """Return True if this rank may wait again after a timeout."""
        return False

    def continues_without(self, rank: int) -> bool:
        """Evict a world rank silent for `timeout_s`. Return True if the remaining ranks continue.

        Local; only for a rank on this host. False without fault tolerance: the job must end.
        """
        return False

    def raise_rank_failure(self, error: BaseException, place: str) -> None:
        """Raise `RanksLost` for an error that reports a failed rank, if ranks are fault-tolerant.

        Args:
            error: raised by MPI.
            place: name of the wait.
        """

    def _finished_ranks(self, wait: Wait, now: float) -> list[int]:
        """Return the finished ranks that this wait is for."""
        if self.finish_protocol is None:
            return []
        if wait.counter is not None:
            return self.finish_protocol.missing(wait.counter, wait.counter.collective_counts)
        if wait.peer is None or not self.has_finished(wait.peer):
            return []
        since = max(wait.since, self._first_missing.setdefault(wait.peer, now))
        return [wait.peer] if now - since > ON_ITS_WAY_S else []

    def _print_problem(self, wait: Wait) -> None:
        """Print this rank's problem: the other ranks may take long to arrive."""
        problem, wait.problem = wait.problem, None
        if problem is not None:
            write_stderr(
                f"[rank {self._rank}] parallel_sgd: {problem}; this rank now waits for the other "
                f"ranks, to report it (in {wait.name})"
            )

    def _waiting_stack(self, wait: Wait) -> list[str]:
        """Return the stack of the waiting thread, in lines."""
        stack = [] if _status_query and _status_query.showing_stacks else stack_lines(_stack(wait))
        lines = ["where it waits:", *stack] if stack else []
        return [f"[rank {self._rank}] {line}" for line in lines]

    def _missing_ranks(self, wait: Wait) -> list[str]:
        """Query all ranks, with their stacks, and describe the missing ranks in lines."""
        if _status_query is None or self.finish_protocol is None:
            now = time.monotonic()
            lines = [neighbour.in_words(now) for neighbour in silent(now)]
            if wait.awaited is not None and (awaited_ranks := wait.awaited()):
                lines.append(f"it has waited for {in_words(awaited_ranks)}")
        else:
            name, collective_counts = "", None
            awaited: Sequence[int] = range(_status_query.size)
            if wait.counter is not None:
                name, collective_counts, awaited = (
                    wait.counter.name,
                    wait.counter.collective_counts,
                    wait.counter.ranks,
                )
            elif wait.peer is not None:
                awaited = (wait.peer,)
            why = f"has waited more than {self.timeout_s:g} s in {wait.name}"
            answers = _status_query.query_all(name, why)
            awaited_others = [rank for rank in awaited if rank != self._rank]
            lines = missing_in_words(awaited_others, answers, collective_counts)
        return [f"[rank {self._rank}] parallel_sgd: {line}" for line in lines]

    def _end(
        self,
        wait: Wait,
        lines: Sequence[str],
        status: Status,
        more_lines: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """End the job. Print these lines first, then those of `more_lines`, after a while.

        Args:
            status: end status of this rank.
        """
        _ending.append(wait)
        report_status(status)
        self._print_problem(wait)
        with contextlib.suppress(RuntimeError):  # Python is exiting, or too many threads
            threading.Timer(_EXITS_S, os._exit, args=(1,)).start()
        write_stderr(*lines)
        write_stderr(*more_lines())
        _waits.discard(wait)  # end the job once
        time.sleep(GRACE_S)  # mpiexec drops unread output, of this rank and of all ranks
        self._abort()
        _ending.remove(wait)


@dataclass(eq=False, slots=True)
class Wait:
    """The wait of one thread, inside its `with` block."""

    watchdog: Watchdog
    name: str
    counter: CollectiveCounter | None
    peer: int | None
    problem: str | None
    awaited: Callable[[], Sequence[int]] | None = None
    thread: int = field(init=False)
    since: float = field(init=False)

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        self.since = _latest[0] = time.monotonic()
        _waits.add(self)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        _waits.discard(self)
        # bounded: a timer ends the process within seconds
        while _ending:  # this rank has announced the job's end: do not continue meanwhile
            time.sleep(0.01)
        if error is not None:
            self.watchdog.raise_rank_failure(error, self.name)


_waits: set[Wait] = set()  # current waits of all watchdogs
_ending: list[Wait] = []  # waits that are ending the job
_latest = [0.0]  # start of the latest wait
_stands_by = [""]  # awaited work while standing by, else empty
_status_query: StatusQuery | None = None
_starting = threading.Lock()
_thread: threading.Thread | None = None


def _start() -> None:
    """Start the thread that checks all waits."""
    global _thread
    with _starting:
        if _thread is None:
            _thread = threading.Thread(target=_watch, daemon=True, name="watchdog")
            _thread.start()


def _watch() -> None:
    checked = time.monotonic()
    # bounded: the watchdog itself
    while True:
        time.sleep(CHECK_INTERVAL_S)
        waits, now = _waits.copy(), time.monotonic()  # set.copy is atomic between threads
        paused, checked = now - checked, now
        if paused > _LONGEST_PAUSE_S:
            for wait in waits:
                wait.since = min(now, wait.since + paused)
        name, since = _longest() or (_stands_by[0], 0.0)
        own.note(now, _latest[0], since, name)
        check_messages()
        if _status_query is not None:
            _status_query.check_messages()
        for wait in waits:
            wait.watchdog.check(wait, now)


def _longest() -> tuple[str, float] | None:
    """Return the name and start time of this rank's longest wait, or None."""
    wait = min(_waits.copy(), key=lambda wait: wait.since, default=None)
    return None if wait is None else (wait.name, wait.since)


@contextlib.contextmanager
def standing_by(what: str) -> Iterator[None]:
    """Context manager for time without work until other ranks need this rank. For the main thread.

    A rank standing by is never evicted, however long this takes.

    Args:
        what: awaited work, for messages.
    """
    before, _stands_by[0] = _stands_by[0], what
    try:
        yield
    finally:
        _stands_by[0] = before


def query_status(finish_protocol: FinishProtocol, world: MPI.Intracomm, timeout_s: float) -> None:
    """Query all ranks after a timeout from now on, and answer their queries.

    Local, at the same place on all ranks.
    """
    global _status_query
    if _status_query is None:
        _status_query = StatusQuery(finish_protocol, world.rank, world.size, _longest)
        finish_protocol.on_wait = FinishWait(_status_query, world.rank)
    _status_query.timeout_s = timeout_s


def message(timeout_s: float, rank: int, name: str) -> str:
    return (
        f"[rank {rank}] parallel_sgd: waited more than timeout_s={timeout_s:g} s for the other "
        f"ranks in {name}: a rank has stopped, finished, or called another collective; ending the "
        "job"
    )


def _stack(wait: Wait) -> traceback.StackSummary:
    """Return the stack of the waiting thread, empty if it has ended."""
    frame = sys._current_frames().get(wait.thread)
    return traceback.StackSummary() if frame is None else traceback.extract_stack(frame)
