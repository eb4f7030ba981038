"""No endless waits: what ends the job when other ranks let this one wait too long, or have left."""

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

from ...errors import RanksLost
from ..phrases import in_words, waiting_for_finished
from ..stderr import write_stderr
from .abort import GRACE_S, user_location
from .diagnosis import StatusQuery, missing_in_words, silent, stack_lines
from .eviction import evict, evict_unresponsive_ranks
from .failure import is_rank_failure
from .finish import ON_ITS_WAY_S, CollectiveCounter, FinishProtocol, check_messages
from .finish_wait import FinishWait
from .heartbeat import RankState, own
from .rank_status import FAILED, LOST, report_end

if TYPE_CHECKING:
    from mpi4py import MPI


#: How often a thread looks after the waits; shorter ones it leaves in peace.
CHECK_INTERVAL_S = 0.5

#: The watchdog has not looked for so long: it was stopped with its process, or got no core. That
#: time counts for no wait: the others may have been stopped as well (as batch systems do it).
_STOOD_STILL_S = 3.0

#: MPI has told the others that a rank is dead after so long.
_TOLD_S = 10.0

#: A process that ends the job has ended itself after so long.
_ENDS_S = 5.0

#: When a rank with a problem prints it: the others as a rule come sooner, and print it too.
REPORT_PROBLEM_AFTER_S = 1.0


class Watchdog:
    """Used as ``with watchdog("alltoall", counter): ...`` around every wait for other ranks, in any
    thread.

    A wait ends the job where it lasts longer than `timeout_s`, or, within seconds, where it is for
    a rank that has left.

    Args:
        timeout_s: longest time in one wait, in seconds, more than 0.
        rank: named in the message.
        abort: ends the job on all ranks; this process is ended 5 s later if it could not.
        departures: tells who has left; None: nobody does. It may be given later.

    Entering and leaving costs well under a microsecond; one thread, from the first wait in this
    process on, looks after those of all watchdogs, twice a second.
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
        self.fault_tolerant = (
            False  #: whether what says that ranks have died is told as `RanksLost`
        )
        self._gone_since: dict[int, float] = {}  # ranks of the world, as far as this one has seen

    def __call__(
        self,
        name: str,
        counter: CollectiveCounter | None = None,
        *,
        peer: int | None = None,
        problem: str | None = None,
    ) -> Wait:
        """A wait; one after the other, it may be used for several.

        Args:
            name: of what is waited in.
            calls: of the communicator, where it is in a collective, which has been counted.
            peer: the rank of the world that is waited for, where it is for a message.
            problem: why this rank cannot go on, of which the others are to hear in this wait: it is
                printed if they do not come soon.
        """
        if _thread is None:
            _start()
        return Wait(self, name, counter, peer, problem)

    def register(self, counter: CollectiveCounter) -> CollectiveCounter:
        """Tell the others at the end, too, how many of these there were. Local."""
        return self.finish_protocol.register(counter) if self.finish_protocol else counter

    def show_stacks(self, peer: int, why: str) -> None:
        """Have all ranks show their stacks, and say what a rank of the world does. Takes a while.

        Args:
            why: this rank asks, after "rank 3".
        """
        if _status_query is not None and self.finish_protocol is not None:
            lines = missing_in_words([peer], _status_query.query_all("", why), None)
            write_stderr(*(f"[rank {self._rank}] parallel_sgd: {line}" for line in lines))

    def has_finished(self, rank: int) -> bool:
        """Whether a rank of the world is known to have left. Local."""
        return self.finish_protocol is not None and self.finish_protocol.has_finished(rank)

    def check(self, wait: Wait, now: float) -> None:
        """See that one of this watchdog's waits is not in vain, nor too long."""
        if now - wait.since > self.timeout_s and self._goes_on_without_others(wait, now):
            wait.since = now
        elif now - wait.since > self.timeout_s:
            why = message(self.timeout_s, self._rank, wait.name)
            self._end(wait, [why, *self._where(wait)], LOST, partial(self._missed, wait))
        elif now - wait.since < CHECK_INTERVAL_S:
            return
        elif gone := self._gone(wait, now):
            why = waiting_for_finished(gone, f"parallel_sgd: this rank waits in {wait.name}")
            place = user_location(_stack(wait))
            self._end(wait, [f"[rank {self._rank}] {why}; ending the job{place}"], FAILED)
        elif now - wait.since > REPORT_PROBLEM_AFTER_S:
            self._tell_problem(wait)

    def _goes_on_without_others(self, wait: Wait, now: float) -> bool:
        """Whether ranks that others wait for are killed, so that these can go on: here, or by
        another rank just now."""
        if not self.fault_tolerant or own.heartbeat_table is None:
            return False
        # What they do is known as of their latest looks, and of their latest but one.
        for_s = max(self.timeout_s - 2 * CHECK_INTERVAL_S, self.timeout_s / 2)
        killed = evict_unresponsive_ranks(own.heartbeat_table, for_s)
        if killed:
            write_stderr(
                f"[rank {self._rank}] parallel_sgd: waited more than timeout_s={self.timeout_s:g} "
                f"s in {wait.name} for {in_words(killed)}: killed, and the others go on"
            )
        gone = [line.rank for line in own.neighbours() if line.state(now) is RankState.EXITED]
        if wait.counter is not None:  # else who is waited for may wait for others
            gone = [rank for rank in gone if rank in wait.counter.ranks]
        told = [self._gone_just_now(rank, now) for rank in gone]
        return bool(killed) or any(told)

    def _gone_just_now(self, rank: int, now: float) -> bool:
        """Whether MPI may not have told yet that a rank of the world is gone."""
        return now - self._gone_since.setdefault(rank, now) < _TOLD_S

    def continues_without(self, rank: int) -> bool:
        """Whether the others go on without a rank of the world that has let one wait too long for a
        word: it is killed, or has just been. One that waits itself is left to those that look after
        its wait. Local; only on its own host.
        """
        now = time.monotonic()
        line = next((line for line in own.neighbours() if line.rank == rank), None)
        if not self.fault_tolerant or line is None:
            return False
        state = line.state(now)
        if state is RankState.EXITED:
            return self._gone_just_now(rank, now)
        if state is RankState.WAITS:
            return True
        if state is RankState.STANDS_BY:  # its program has ended, and asks for nothing any more
            return False
        write_stderr(
            f"[rank {self._rank}] parallel_sgd: nothing was heard of rank {rank} for timeout_s="
            f"{self.timeout_s:g} s: killed, and the others go on"
        )
        return bool(evict([line], show=True))

    def _gone(self, wait: Wait, now: float) -> list[int]:
        """The ranks for which this wait is in vain."""
        if self.finish_protocol is None:
            return []
        if wait.counter is not None:
            return self.finish_protocol.missing(wait.counter, wait.counter.collective_counts)
        if wait.peer is None or not self.has_finished(wait.peer):
            return []
        since = max(wait.since, self._gone_since.setdefault(wait.peer, now))
        return [wait.peer] if now - since > ON_ITS_WAY_S else []

    def _tell_problem(self, wait: Wait) -> None:
        """Print why this rank cannot go on: the others may let it wait for long."""
        problem, wait.problem = wait.problem, None
        if problem is not None:
            write_stderr(
                f"[rank {self._rank}] parallel_sgd: {problem}; this rank now waits for the others, "
                f"to tell them (in {wait.name})"
            )

    def _where(self, wait: Wait) -> list[str]:
        """The stack of the thread that waits, in lines."""
        stack = [] if _status_query and _status_query.showing_stacks else stack_lines(_stack(wait))
        lines = ["where it waits:", *stack] if stack else []
        return [f"[rank {self._rank}] {line}" for line in lines]

    def _missed(self, wait: Wait) -> list[str]:
        """Who has not come, as far as that can be told, in lines; all ranks show their stacks."""
        if _status_query is None or self.finish_protocol is None:
            now = time.monotonic()
            lines = [line.in_words(now) for line in silent(now)]
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
            others = [rank for rank in awaited if rank != self._rank]
            lines = missing_in_words(others, answers, collective_counts)
        return [f"[rank {self._rank}] parallel_sgd: {line}" for line in lines]

    def _end(
        self,
        wait: Wait,
        lines: Sequence[str],
        word: str,
        more: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """End the job, with these lines, and more that take a while.

        Args:
            word: for `report_end`.
        """
        _ending.append(wait)
        report_end(word)
        self._tell_problem(wait)
        with contextlib.suppress(RuntimeError):  # Python ends, or there are too many threads
            threading.Timer(_ENDS_S, os._exit, args=(1,)).start()
        write_stderr(*lines)
        write_stderr(*more())
        _waits.discard(wait)  # it is ended once
        time.sleep(GRACE_S)  # mpiexec drops what it has not read yet, here and from the others
        self._abort()
        _ending.remove(wait)


@dataclass(eq=False, slots=True)
class Wait:
    """The wait of one thread, while it is in this `with` block."""

    watchdog: Watchdog
    name: str
    counter: CollectiveCounter | None
    peer: int | None
    problem: str | None
    thread: int = field(init=False)
    since: float = field(init=False)

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        self.since = _latest[0] = time.monotonic()
        _waits.add(self)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        _waits.discard(self)
        while _ending:  # this rank has said so: it does not go on, whoever comes in the meantime
            time.sleep(0.01)
        if error is not None and self.watchdog.fault_tolerant and is_rank_failure(error):
            raise RanksLost(f"a rank has died: found in {self.name}") from error


_waits: set[Wait] = set()  # of all watchdogs
_ending: list[Wait] = []  # for which the job ends
_latest = [0.0]  # when the latest of them has begun
_stands_by = [""]  # for what this rank does, if it does
_status_query: StatusQuery | None = None
_starting = threading.Lock()
_thread: threading.Thread | None = None


def _start() -> None:
    """The thread that looks after them."""
    global _thread
    with _starting:
        if _thread is None:
            _thread = threading.Thread(target=_watch, daemon=True, name="watchdog")
            _thread.start()


def _watch() -> None:
    looked = time.monotonic()
    while True:
        time.sleep(CHECK_INTERVAL_S)
        waits, now = _waits.copy(), time.monotonic()  # one step: no thread comes between
        stood, looked = now - looked, now
        if stood > _STOOD_STILL_S:
            for wait in waits:
                wait.since = min(now, wait.since + stood)
        name, since = _longest() or (_stands_by[0], 0.0)
        own.note(now, _latest[0], since, name)
        check_messages()
        if _status_query is not None:
            _status_query.check_messages()
        for wait in waits:
            wait.watchdog.check(wait, now)


def _longest() -> tuple[str, float] | None:
    """What this rank waits in, and since when; None: it waits for nobody."""
    wait = min(_waits.copy(), key=lambda wait: wait.since, default=None)
    return None if wait is None else (wait.name, wait.since)


@contextlib.contextmanager
def standing_by(what: str) -> Iterator[None]:
    """For a `with` block in which this rank has nothing to do until others want something of it:
    however long that takes, nobody waits for it in vain. For the main thread.

    Args:
        what: it stands by for.
    """
    before, _stands_by[0] = _stands_by[0], what
    try:
        yield
    finally:
        _stands_by[0] = before


def query_status(finish_protocol: FinishProtocol, world: MPI.Intracomm, timeout_s: float) -> None:
    """From now on a rank that waits too long asks the others what they do, and this one answers.

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
        f"ranks in {name}: one of them has stopped, left, or called something else; ending the job"
    )


def _stack(wait: Wait) -> traceback.StackSummary:
    """Of the thread that waits, if it still does."""
    frame = sys._current_frames().get(wait.thread)
    return traceback.StackSummary() if frame is None else traceback.extract_stack(frame)
