"""No endless waits: what ends the job when the other ranks let this one wait too long."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType

from .abort import GRACE_S

#: The process of `ended_if_longer_than`: its stdin is closed when the wait is over.
_GUARD = """
import os, select, signal, sys, time
pid, timeout_s, grace_s, message = sys.argv[1:]
if not select.select([0], [], [], float(timeout_s))[0]:
    print(message, file=sys.stderr, flush=True)
    time.sleep(float(grace_s))  # for the others that wait too, to say so
    os.kill(int(pid), signal.SIGKILL)
"""


class Watchdog:
    """Used as ``with watchdog("alltoall"): ...`` around every wait for other ranks, in any thread.

    Args:
        timeout_s: longest time in one wait, in seconds, more than 0.
        rank: named in the message.
        abort: ends the job on all ranks; this process is ended 5 s later if it could not.

    Entering and leaving costs well under a microsecond; a thread looks a few times per timeout.
    """

    def __init__(self, timeout_s: float, rank: int, abort: Callable[[], object]) -> None:
        assert timeout_s > 0
        self.timeout_s, self._rank, self._abort = timeout_s, rank, abort
        self._waits: set[_Wait] = set()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def __call__(self, name: str) -> _Wait:
        if self._thread is None:
            self._start()
        return _Wait(self._waits, name)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
                self._thread.start()

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self.timeout_s / 4))
            for wait in self._waits.copy():  # one step of the interpreter: no thread comes between
                if time.monotonic() - wait.since > self.timeout_s:
                    return self._end(wait)

    def _end(self, wait: _Wait) -> None:
        lines = [_message(self.timeout_s, self._rank, wait.name)]
        frame = sys._current_frames().get(wait.thread)
        if frame is not None:
            lines.append(f"[rank {self._rank}] where it waits:")
            stack = "".join(traceback.format_stack(frame))
            lines += [f"[rank {self._rank}] {line}" for line in stack.splitlines()]
        threading.Timer(5.0, os._exit, args=(1,)).start()
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be gone
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()
        time.sleep(GRACE_S)  # mpiexec drops what it has not read yet, here and from the others
        self._abort()


class _Wait:
    """One wait of one thread."""

    __slots__ = ("_waits", "name", "since", "thread")

    def __init__(self, waits: set[_Wait], name: str) -> None:
        self._waits, self.name = waits, name

    def __enter__(self) -> None:
        self.thread, self.since = threading.get_ident(), time.monotonic()
        self._waits.add(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._waits.discard(self)


@contextlib.contextmanager
def ended_if_longer_than(timeout_s: float, rank: int, name: str) -> Iterator[None]:
    """Kill this process if the body takes too long, even where no thread could: MPI_Init.

    mpi4py holds Python's lock throughout MPI_Init, so another process has to watch. A rank that
    dies of a signal ends the job on Open MPI and on MPICH, also before MPI is up.

    Local. Cost: starting one bare interpreter, some 10 ms in the background.
    """
    facts = map(str, (os.getpid(), timeout_s, GRACE_S, _message(timeout_s, rank, name)))
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
