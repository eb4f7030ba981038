"""Threads, locks and clocks: Python's own, or those of a simulated schedule.

Ranks as threads may run under a scheduler (`parallel_sgd.testing.explore`). The scheduler lets one
thread run at a time, chooses the next one at every call of this module, and has a clock of its own.
A thread knows its scheduler; all other threads use Python's own objects. So the objects here may be
made and used by both kinds of threads. All that waits, sleeps or reads a clock in a rank's program
uses this module. Local.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

LOOK_S = 0.2  #: longest wait for a thread without a look at signals


class SimulatedFailure(BaseException):
    """Ends a rank without notice, like a killed process, when raised in a fault-tolerant world."""


class Scheduler(Protocol):
    """Decides which thread of a simulated job runs."""

    def point(self, kind: str) -> None:
        """Let any thread that can run go next."""

    def wait(
        self,
        kind: str,
        ready: Callable[[], bool] | None,
        seconds: float | None = None,
        *,
        interrupts: bool = True,
    ) -> bool:
        """Let others run until `ready` is true, and return True; False after `seconds`.

        Args:
            kind: of the wait, for reports.
            ready: None: sleep.
            interrupts: the failure of the thread's process ends the wait.
        """

    def start(self, thread: Thread, start: Callable[[], None]) -> None:
        """Start a thread of the simulated job, by `start`."""

    def run_thread(self, thread: Thread, run: Callable[[], None]) -> None:
        """Run a started thread, by `run`. Called by the thread itself."""

    def process_failed(self) -> bool:
        """Return True if the calling thread's process has failed."""

    def leave_process(self) -> None:
        """Make the calling thread part of no process, so that it outlives its process."""

    def now(self) -> float:
        """Return the simulated time, in seconds."""

    def changed(self) -> None:
        """Note that a waiting thread may have a reason to go on."""

    def delivery(self) -> float:
        """Return the time at which a message sent now arrives."""

    def chance(self) -> bool:
        """Return one of two outcomes that are both possible here."""

    def preempted(self) -> bool:
        """Return True if the calling thread's process has had a notice of preemption."""


class _Local(threading.local):
    scheduler: Scheduler | None = None


_local = _Local()


def scheduler() -> Scheduler | None:
    """Return the scheduler of the calling thread, or None."""
    return _local.scheduler


def set_scheduler(chosen: Scheduler | None) -> None:
    """Set the scheduler of the calling thread."""
    _local.scheduler = chosen


def leave_process() -> None:
    """Let the calling thread outlive its simulated process, to clean up after it."""
    chosen = _local.scheduler
    if chosen is not None:
        chosen.leave_process()


def chance() -> bool:
    """Return False, or by chance True where a simulated schedule may go on in two ways."""
    chosen = _local.scheduler
    return chosen is not None and chosen.chance()


def process_failed() -> bool:
    """Return True in a thread of a simulated process that has failed, but not yet ended."""
    chosen = _local.scheduler
    return chosen is not None and chosen.process_failed()


def _note_change() -> None:
    chosen = _local.scheduler
    if chosen is not None:
        chosen.changed()


def delivery() -> float:
    """Return the time at which a message sent now arrives: at once, but for simulated delays."""
    chosen = _local.scheduler
    return 0.0 if chosen is None else chosen.delivery()


def monotonic() -> float:
    """Return the time in seconds, as `time.monotonic`."""
    chosen = _local.scheduler
    return time.monotonic() if chosen is None else chosen.now()


def perf_counter() -> float:
    """Return the time in seconds, as `time.perf_counter`."""
    chosen = _local.scheduler
    return time.perf_counter() if chosen is None else chosen.now()


def perf_counter_ns() -> int:
    """Return the time in nanoseconds, as `time.perf_counter_ns`."""
    chosen = _local.scheduler
    return time.perf_counter_ns() if chosen is None else int(chosen.now() * 1e9)


def sleep(seconds: float) -> None:
    """Sleep, as `time.sleep`."""
    chosen = _local.scheduler
    if chosen is None:
        time.sleep(seconds)
    else:
        chosen.wait("sleep", None, seconds)


def sched_yield() -> None:
    """Let other threads run, as `os.sched_yield`."""
    chosen = _local.scheduler
    if chosen is None:
        os.sched_yield()
    else:
        chosen.point("yield")


class Lock:
    """A lock, as `threading.Lock`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        chosen = _local.scheduler
        if chosen is not None:
            chosen.wait("lock", self._is_free)
        # bounded: no holder waits for others; in a simulated schedule it is free
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _is_free(self) -> bool:
        return not self._lock.locked()


class Condition(Lock):
    """A condition variable with its lock, as `threading.Condition`."""

    def __init__(self) -> None:
        super().__init__()
        self._real = threading.Condition(self._lock)
        self._waiters: list[list[bool]] = []  # of simulated threads: notified yet

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for `notify_all`. Return False after `seconds`."""
        chosen = _local.scheduler
        if chosen is None:
            return self._real.wait(seconds)
        notified = [False]
        self._waiters.append(notified)
        self._lock.release()
        try:
            return chosen.wait("condition", lambda: notified[0], seconds)
        finally:
            self._waiters = [waiter for waiter in self._waiters if waiter is not notified]
            if self._lock.locked():
                chosen.wait("lock", self._is_free, interrupts=False)
            # bounded: it is free
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until the predicate is true. Return its value after `seconds`."""
        until = None if seconds is None else monotonic() + seconds
        # bounded: by its callers
        while not predicate():
            left = None if until is None else until - monotonic()
            if left is not None and left <= 0:
                return predicate()
            self.wait(left)
        return True

    def notify_all(self) -> None:
        """Wake all waiting threads. The caller holds the lock."""
        _note_change()
        self._real.notify_all()
        for notified in self._waiters:
            notified[0] = True


class Event:
    """An event, as `threading.Event`."""

    def __init__(self) -> None:
        self._real = threading.Event()

    def is_set(self) -> bool:
        """Return True once the event is set."""
        chosen = _local.scheduler
        if chosen is not None:
            chosen.point("event")
        return self._real.is_set()

    def set(self) -> None:
        """Set the event."""
        _note_change()
        self._real.set()

    def clear(self) -> None:
        """Unset the event."""
        self._real.clear()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the event is set. Return False after `seconds`."""
        chosen = _local.scheduler
        if chosen is None:
            return self._real.wait(seconds)
        return chosen.wait("event", self._real.is_set, seconds)


class Thread(threading.Thread):
    """A daemon thread, part of a simulated schedule if started by a thread of the schedule.

    Args:
        target: run by the thread.
        name: name of the thread.
        process: number of the simulated process; None: that of the starting thread.
    """

    def __init__(self, target: Callable[[], object], name: str, process: int | None = None) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.process = process
        self.scheduler: Scheduler | None = None
        self.ended = Event()

    def start(self) -> None:
        """Start the thread."""
        chosen = self.scheduler = _local.scheduler
        if chosen is None:
            super().start()
        else:
            chosen.start(self, super().start)

    def run(self) -> None:
        """Run the target."""
        try:
            if self.scheduler is None:
                super().run()
            else:
                self.scheduler.run_thread(self, super().run)
        finally:
            self.ended.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end. An interrupt ends the wait, also one just before the wait."""
        if _local.scheduler is not None:
            self.ended.wait(timeout)
            return
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self.ended.wait(max(0.0, min(LOOK_S, until - time.monotonic()))):
            if time.monotonic() >= until:
                return
        # Not the first wait: after an interrupt Python 3.11 would take the thread for ended.
        super().join(timeout)

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the thread, as soon as Python code runs there."""
        if self.ident is not None and not self.ended.is_set():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self.ident), ctypes.py_object(KeyboardInterrupt)
            )
