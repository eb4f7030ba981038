"""No endless waits: what ends the job when other ranks let this one wait too long, or have left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import RanksLost
from .abort import GRACE_S, users_line
from .attendance import END, FAILED, place_of, sign_off
from .departures import ON_ITS_WAY_S, Calls, Departures, look
from .loss import is_loss
from .phrases import left_in_vain

#: The process of `ended_if_longer_than`: its stdin is closed when the wait is over.
_GUARD = """
import os, select, signal, sys, time
pid, timeout_s, grace_s, message, end, failed = sys.argv[1:]
if not select.select([0], [], [], float(timeout_s))[0]:
    print(message, file=sys.stderr, flush=True)
    if end:
        open(end, "w").write(failed)
    time.sleep(float(grace_s))  # for the others that wait too, to say so
    os.kill(int(pid), signal.SIGKILL)
"""


#: How often a thread looks after the waits; shorter ones it leaves in peace.
LOOKS_EVERY_S = 0.5

#: When a rank with a problem prints it: the others as a rule come sooner, and print it too.
TELLS_AFTER_S = 1.0


class Watchdog:
    """Used as ``with watchdog("alltoall", calls): ...`` around every wait for other ranks, in any
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
        departures: Departures | None = None,
    ) -> None:
        assert timeout_s > 0
        self.timeout_s, self._rank, self._abort = timeout_s, rank, abort
        self.departures = departures
        self.survives = False  #: whether what says that ranks have died is told as `RanksLost`
        self._gone_since: dict[int, float] = {}  # ranks of the world, as far as this one has seen

    def __call__(
        self,
        name: str,
        calls: Calls | None = None,
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
        return Wait(self, name, calls, peer, problem)

    def know(self, calls: Calls) -> Calls:
        """Tell the others at the end, too, how many of these there were. Local."""
        return self.departures.know(calls) if self.departures else calls

    def has_left(self, rank: int) -> bool:
        """Whether a rank of the world is known to have left. Local."""
        return self.departures is not None and self.departures.has_left(rank)

    def look_after(self, wait: Wait, now: float) -> None:
        """See that one of this watchdog's waits is not in vain, nor too long."""
        if now - wait.since > self.timeout_s:
            why = _message(self.timeout_s, self._rank, wait.name)
            self._end(wait, [why, *self._where(wait)])
        elif now - wait.since < LOOKS_EVERY_S:
            return
        elif gone := self._gone(wait, now):
            why = left_in_vain(gone, f"parallel_sgd: this rank waits in {wait.name}")
            place = users_line(_stack(wait))
            self._end(wait, [f"[rank {self._rank}] {why}; ending the job{place}"])
        elif now - wait.since > TELLS_AFTER_S:
            self._tell_problem(wait)

    def _gone(self, wait: Wait, now: float) -> list[int]:
        """The ranks for which this wait is in vain."""
        if self.departures is None:
            return []
        if wait.calls is not None:
            return self.departures.missing(wait.calls, wait.calls.entered)
        if wait.peer is None or not self.has_left(wait.peer):
            return []
        since = max(wait.since, self._gone_since.setdefault(wait.peer, now))
        return [wait.peer] if now - since > ON_ITS_WAY_S else []

    def _tell_problem(self, wait: Wait) -> None:
        """Print why this rank cannot go on: the others may let it wait for long."""
        problem, wait.problem = wait.problem, None
        if problem is not None:
            _print(
                f"[rank {self._rank}] parallel_sgd: {problem}; this rank now waits for the others, "
                f"to tell them (in {wait.name})"
            )

    def _where(self, wait: Wait) -> list[str]:
        """The stack of the thread that waits, in lines."""
        text = "".join(traceback.format_list(_stack(wait)))
        lines = ["where it waits:", *text.splitlines()] if text else []
        return [f"[rank {self._rank}] {line}" for line in lines]

    def _end(self, wait: Wait, lines: Sequence[str]) -> None:
        _waits.discard(wait)  # it is ended once
        sign_off(FAILED)
        self._tell_problem(wait)
        threading.Timer(5.0, os._exit, args=(1,)).start()
        _print("\n".join(lines))
        time.sleep(GRACE_S)  # mpiexec drops what it has not read yet, here and from the others
        self._abort()


@dataclass(eq=False, slots=True)
class Wait:
    """The wait of one thread, while it is in this `with` block."""

    watchdog: Watchdog
    name: str
    calls: Calls | None
    peer: int | None
    problem: str | None
    thread: int = field(init=False)
    since: float = field(init=False)

    def __enter__(self) -> None:
        self.thread, self.since = threading.get_ident(), time.monotonic()
        _waits.add(self)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        _waits.discard(self)
        if error is not None and self.watchdog.survives and is_loss(error):
            raise RanksLost(f"a rank has died: found in {self.name}") from error


_waits: set[Wait] = set()  # of all watchdogs
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
    while True:
        time.sleep(LOOKS_EVERY_S)
        waits, now = _waits.copy(), time.monotonic()  # one step: no thread comes between
        look()
        for wait in waits:
            wait.watchdog.look_after(wait, now)


@contextlib.contextmanager
def ended_if_longer_than(timeout_s: float, rank: int, name: str) -> Iterator[None]:
    """Kill this process if the body takes too long, even where no thread could: MPI_Init.

    mpi4py holds Python's lock throughout MPI_Init, so another process has to watch. A rank that
    dies of a signal ends the job on Open MPI and on MPICH, also before MPI is up.

    Local. Cost: starting one bare interpreter, some 10 ms in the background.
    """
    message, end = _message(timeout_s, rank, name), place_of(END) or ""
    facts = map(str, (os.getpid(), timeout_s, GRACE_S, message, end, FAILED))
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, *facts],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    with guard:
        try:
            yield
        finally:
            guard.kill()


def _message(timeout_s: float, rank: int, name: str) -> str:
    return (
        f"[rank {rank}] parallel_sgd: waited more than timeout_s={timeout_s:g} s for the other "
        f"ranks in {name}: one of them has stopped, left, or called something else; ending the job"
    )


def _stack(wait: Wait) -> traceback.StackSummary:
    """Of the thread that waits, if it still does."""
    frame = sys._current_frames().get(wait.thread)
    return traceback.StackSummary() if frame is None else traceback.extract_stack(frame)


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be gone
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
