"""No endless waits: a thread that ends the job when a collective takes too long."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType


class Watchdog:
    """Used as ``with watchdog("alltoall"): ...`` around every wait for other ranks.

    Args:
        timeout_s: longest time in one wait, in seconds.
        rank: named in the message.
        abort: ends the job on all ranks; this process is ended 5 s later if it could not.

    Entering and leaving is two attribute writes; the thread looks a few times per timeout.
    """

    def __init__(self, timeout_s: float, rank: int, abort: Callable[[], object]) -> None:
        self.timeout_s, self._rank, self._abort = timeout_s, rank, abort
        self._waiting: tuple[str, float] | None = None
        self._thread: threading.Thread | None = None
        self._name = ""

    def __call__(self, name: str) -> Watchdog:
        self._name = name
        return self

    def __enter__(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
            self._thread.start()
        self._waiting = (self._name, time.monotonic())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._waiting = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self.timeout_s / 4))
            waiting = self._waiting
            if waiting is not None and time.monotonic() - waiting[1] > self.timeout_s:
                self._end(waiting[0])

    def _end(self, name: str) -> None:
        print(
            f"[rank {self._rank}] parallel_sgd: waited more than timeout_s={self.timeout_s:g} s "
            f"for the other ranks in {name}: one of them has stopped, left, or called something "
            "else; ending the job",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(file=sys.stderr)
        threading.Timer(5.0, os._exit, args=(1,)).start()
        self._abort()
