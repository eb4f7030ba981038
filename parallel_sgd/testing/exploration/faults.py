"""Faults of a schedule: failures of ranks, slow messages, notices, and files that fail."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from ... import runtime
from .scheduler import Schedule

SLOW_S = (1e-4, 1e-3, 0.03)  #: how late a slow message is, in seconds
HOW = {
    "full": "the disk is full",
    "error": "the disk fails",
    "cut": "the disk fails, and keeps half of the file",
    "before": "the rank fails before it",
    "after": "the rank fails after it",
    "torn": "the rank fails, and half of the file is kept",
}
"""How a file operation fails."""

ENDING = ("before", "after", "torn")  #: of these, those in which the rank fails

AFTER = 3000  #: most points between a failure and the next one that may meet its recovery


@dataclass
class Failure:
    """The failure of a rank at a point.

    Attributes:
        rank: number of the rank, standby ranks last.
        point: number of the rank's point, from 1. With `waits`: of the job's point, whatever the
            rank waits for then. With `after`: points of the job after that failure.
        waits: see `point`.
        after: the earlier failure, or None.
        at: total points of the job at the failure; None before it.
    """

    rank: int
    point: int
    waits: bool = False
    after: Failure | None = None
    at: int | None = None

    def due(self, process: int | None, points: int, total: int) -> bool:
        if self.at is not None:
            return False
        if self.after is not None:
            return self.after.at is not None and total >= self.after.at + self.point
        return total >= self.point if self.waits else process == self.rank and points >= self.point

    def __str__(self) -> str:
        if self.waits:
            return f"rank {self.rank} fails at point {self.point} of the job"
        if self.after is None:
            return f"rank {self.rank} fails at its point {self.point}"
        return f"rank {self.rank} fails {self.point} points after rank {self.after.rank}"


@dataclass
class Notice:
    """A notice of preemption for a rank, at a point of the rank."""

    rank: int
    point: int

    def __str__(self) -> str:
        return f"rank {self.rank} gets a notice of preemption at its point {self.point}"


@dataclass
class FileFault:
    """A file operation that fails.

    Attributes:
        operation: its number, from 0, among those of all ranks.
        how: see `HOW`.
        lasting: all later operations fail, too.
        path: of the file; None before the fault.
    """

    operation: int
    how: str
    lasting: bool = False
    path: Path | None = None

    def __str__(self) -> str:
        which = f"change {self.operation} of a file" + self.lasting * " and all later ones"
        return f"{which}: {HOW[self.how]}" + (f" ({self.path.name})" if self.path else "")


@dataclass
class Planned:
    """The faults of a schedule.

    Attributes:
        failures: of ranks.
        notices: of preemption.
        file_faults: of file operations.
        slow: share of slow messages.
        slow_s: how late these arrive.
    """

    failures: list[Failure] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    file_faults: list[FileFault] = field(default_factory=list)
    slow: float = 0.0
    slow_s: float = 0.0
    random: Random = field(default_factory=Random)

    def due(self, process: int | None, points: int, total: int) -> list[int]:
        failing = [one for one in self.failures if one.due(process, points, total)]
        for failure in failing:
            failure.at = total
        return [failure.rank for failure in failing]

    def delay_s(self, message: int) -> float:
        return self.slow_s if self.slow and self.random.random() < self.slow else 0.0

    @property
    def struck(self) -> bool:
        """True if a fault has struck, or a notice has been planned."""
        files = any(fault.path is not None for fault in self.file_faults)
        return files or bool(self.notices) or any(one.at is not None for one in self.failures)

    def notified(self, process: int, points: int) -> bool:
        return any(one.rank == process and points >= one.point for one in self.notices)

    def file_operation(self, number: int, kind: str, path: Path) -> str:
        for fault in self.file_faults:
            if number == fault.operation or (fault.lasting and number > fault.operation):
                fault.path = fault.path or path
                return _strike(fault, kind, path)
        return ""

    def __str__(self) -> str:
        texts = [str(one) for one in (*self.failures, *self.notices, *self.file_faults)]
        if self.slow:
            texts.append(f"{self.slow:.0%} of the messages are {self.slow_s:g} s late")
        return "; ".join(texts) or "no faults"


def _strike(fault: FileFault, kind: str, path: Path) -> str:
    """Let a file operation fail. Return when the process ends: see `Faults.file_operation`."""
    if fault.how in ("cut", "torn") and kind == "fsync":
        os.truncate(path, path.stat().st_size // 2)
    if fault.how in ENDING:
        return "before" if fault.how == "before" else "after"
    raise OSError(errno.ENOSPC if fault.how == "full" else errno.EIO, HOW[fault.how], str(path))


_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link"}
_WRITES = os.O_WRONLY | os.O_RDWR
_LOCK_FILE = ".lock"  # freed by the kernel, whatever becomes of its holder
_installed = False


@contextmanager
def file_operations(schedule: Schedule) -> Iterator[None]:
    """Inside, changes of files by ranks are file operations of the schedule.

    Python calls an audit hook before each change of a file. A flush has no such event:
    `os.fsync` is replaced.
    """
    global _installed
    if not _installed:
        sys.addaudithook(_audit)
        _installed = True
    flush = os.fsync

    def flushed(fd: Any) -> None:
        if runtime.scheduler() is schedule:
            number = fd if isinstance(fd, int) else fd.fileno()
            schedule.file_operation("fsync", Path(os.readlink(f"/proc/self/fd/{number}")))
        else:
            flush(fd)

    os.fsync = flushed
    try:
        yield
    finally:
        os.fsync = flush


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        path, _, flags = arguments
        if not isinstance(flags, int) or not flags & _WRITES:
            return
    elif event in _CHANGES:
        path = arguments[0]
    else:
        return
    schedule = runtime.scheduler()
    if not isinstance(schedule, Schedule) or not isinstance(path, str | os.PathLike):
        return
    if Path(path).name != _LOCK_FILE and not _compiles():
        schedule.file_operation(event, Path(path))


def _compiles() -> bool:
    """Return True in a thread that compiles a kernel. Its files are no point: another thread would
    wait for Numba's lock, which the scheduler does not know."""
    module = sys.modules.get("numba.core.compiler_lock")
    return module is not None and module.global_compiler_lock.is_locked()
