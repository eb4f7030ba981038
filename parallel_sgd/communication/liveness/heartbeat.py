"""Heartbeats: the state of every rank of a host, in memory shared with the launcher.

Twice a second the watchdog thread of each rank writes a heartbeat: the current wait for other
ranks, and the time of the latest change. The training loop pays nothing. A rank without recent
heartbeats is stopped, or holds Python's lock. Everything here is local.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import secrets
import signal
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

FILE = "board"  #: file name of the heartbeat table in the launcher's folder
NAME_BYTES = 64

#: process, birth, written, moved, waits_since (0: no wait), timeout_s (0: before MPI_Init), name of
#: the wait or standby
_FIELDS = struct.Struct(f"=qqdddd{NAME_BYTES}s")

#: Header of a copy: checksum of the rest of the copy; number of writes so far.
_HEAD = struct.Struct("=IQ")
_CHECKSUM = struct.Struct("=I")
_COPY_BYTES = 128
assert _HEAD.size + _FIELDS.size <= _COPY_BYTES

HEARTBEAT_BYTES = 2 * _COPY_BYTES
_EMPTY = bytes(HEARTBEAT_BYTES)  #: a rank without a heartbeat, or on another host

#: Most attempts to read a whole copy. All attempts fail only for a rank stopped while writing its
#: first heartbeat.
_LOOKS = 1000

#: A rank is responsive if its heartbeat is younger than this (seconds); it writes twice a second.
FRESH_S = 2.0

#: Signal to make a process write its stacks to stderr, even while Python's lock is held; 0 (no
#: effect) on systems without real-time signals. Not used by programs or batch systems.
SHOW_STACKS = signal.SIGRTMIN + 9 if sys.platform.startswith("linux") else 0


#: Time for a process to write its stacks, in seconds.
SHOWN_S = 0.5

#: Linux process flag, set before an exiting process closes any file.
_PF_EXITING = 0x4


class RankState(Enum):
    """State of a rank, as seen by its host."""

    EXITED = "has exited"
    STOPPED = "is stopped, by a signal or a debugger"
    SILENT = "does not answer: it holds Python's lock, or gets no core"
    STARTS = "has not reached Communicator.world()"
    WAITS = "waits for other ranks"
    STANDS_BY = "stands by"
    COMPUTES = "computes, reads or sleeps"


NOT_ANSWERING = {RankState.STOPPED, RankState.SILENT, RankState.STARTS}
ANSWERING = {RankState.WAITS, RankState.STANDS_BY, RankState.COMPUTES}


@dataclass(frozen=True)
class Heartbeat:
    """Heartbeat of one rank. Times are of the host's monotonic clock, in seconds.

    Attributes:
        rank: world rank.
        process: process id.
        birth: start time of the process in clock ticks, since process ids are reused.
        written: time of writing.
        moved: latest start or end of a wait for other ranks.
        waits_since: start of the current wait; 0.0 without a wait.
        timeout_s: timeout of the rank's communicator; 0.0 before MPI is initialized.
        name: name of the current wait or standby.
    """

    rank: int
    process: int
    birth: int
    written: float
    moved: float
    waits_since: float
    timeout_s: float
    name: str

    def state(self, now: float) -> RankState:
        """Return the state of the rank at a time."""
        process_state = _process_state(self.process, self.birth)
        if process_state is None:
            return RankState.EXITED
        if process_state in "Tt":
            return RankState.STOPPED
        if self.waits_since and not self.timeout_s:  # in MPI_Init, holding Python's lock
            return RankState.WAITS
        if not self.timeout_s:
            return RankState.STARTS
        if now - self.written > FRESH_S:
            return RankState.SILENT
        if self.waits_since:
            return RankState.WAITS
        return RankState.STANDS_BY if self.name else RankState.COMPUTES

    def in_words(self, now: float) -> str:
        """Describe the process and its state, for a message."""
        state = self.state(now)
        words = state.value
        if state is RankState.WAITS:
            words = f"waits in {self.name}"
        elif state is RankState.STANDS_BY:
            words += f" for {self.name}"
        if state is not RankState.EXITED:
            words += f", for {now - self.since(state):.0f} s"
        return f"rank {self.rank} (pid {self.process}) {words}"

    def since(self, state: RankState) -> float:
        """Return the latest possible start of a state."""
        if state is RankState.WAITS:
            return self.waits_since
        return self.written if state in (RankState.STOPPED, RankState.SILENT) else self.moved

    def signal(self, number: int) -> bool:
        """Send the process a signal. Return False if it has exited or may not be signalled."""
        if _process_state(self.process, self.birth) is None:
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.process, number)
            return True
        return False


class HeartbeatTable:
    """Heartbeats of a host's ranks in shared memory, with room for every rank of the world.

    Every rank has two copies of its heartbeat, and writes the older copy. So the newer copy stays
    whole even if the rank is stopped while writing. A reader takes the newest copy with a correct
    checksum. This does not depend on the order in which another core sees the bytes, which differs
    between processors and cannot be controlled from Python.

    Args:
        memory: `HEARTBEAT_BYTES` for each rank.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self.size = memory, len(memory) // HEARTBEAT_BYTES

    def write(self, heartbeat: Heartbeat) -> None:
        if heartbeat.rank >= self.size:
            return
        at = heartbeat.rank * HEARTBEAT_BYTES
        written = max((number for number, _ in self._copies(at)), default=0) + 1
        numbers = (
            heartbeat.process,
            heartbeat.birth,
            heartbeat.written,
            heartbeat.moved,
            heartbeat.waits_since,
        )
        fields = _FIELDS.pack(*numbers, heartbeat.timeout_s, heartbeat.name.encode()[:NAME_BYTES])
        copy = bytearray(_HEAD.pack(0, written) + fields)
        _CHECKSUM.pack_into(copy, 0, zlib.crc32(copy[_CHECKSUM.size :]))
        at += written % 2 * _COPY_BYTES
        self._memory[at : at + len(copy)] = bytes(copy)

    def heartbeats(self) -> list[Heartbeat]:
        """Return the heartbeats of this host's ranks, in rank order, as far as written."""
        return [
            heartbeat for rank in range(self.size) if (heartbeat := self._read(rank)) is not None
        ]

    def _read(self, rank: int) -> Heartbeat | None:
        """Return the newest whole heartbeat of a rank, or None if it has written none."""
        at = rank * HEARTBEAT_BYTES
        for _ in range(_LOOKS):
            if self._memory[at : at + HEARTBEAT_BYTES] == _EMPTY:
                return None
            if copies := self._copies(at):
                _, (process, birth, written, moved, waits_since, timeout_s, name) = max(copies)
                text = name.rstrip(b"\0").decode(errors="replace")
                return Heartbeat(rank, process, birth, written, moved, waits_since, timeout_s, text)
        return None

    def _copies(self, at: int) -> list[tuple[int, tuple[Any, ...]]]:
        """Return the whole copies at an offset: the write count and the fields of each."""
        memory, found = self._memory[at : at + HEARTBEAT_BYTES], []
        for begin in (0, _COPY_BYTES):
            copy = memory[begin : begin + _HEAD.size + _FIELDS.size]
            checksum, number = _HEAD.unpack_from(copy)
            if number and checksum == zlib.crc32(copy[_CHECKSUM.size :]):
                found.append((number, _FIELDS.unpack_from(copy, _HEAD.size)))
        return found


def make_heartbeat_table(path: Path, ranks: int) -> HeartbeatTable:
    """Create or open the table in a file accessible to this user only."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, ranks * HEARTBEAT_BYTES)  # raises OSError on a full disk
        return HeartbeatTable(mmap.mmap(descriptor, ranks * HEARTBEAT_BYTES))
    finally:
        os.close(descriptor)


def open_heartbeat_table(path: Path) -> HeartbeatTable:
    """Open an existing table.

    Raises:
        OSError, ValueError: there is no table.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return HeartbeatTable(mmap.mmap(descriptor, 0))
    finally:
        os.close(descriptor)


class OwnHeartbeat:
    """Writes this process's heartbeat to the table of its host, if there is a table."""

    def __init__(self) -> None:
        self.heartbeat_table: HeartbeatTable | None = None
        self.timeout_s = 0.0  #: timeout of the latest communicator, once MPI is initialized
        self._met = False
        self._latest: Heartbeat | None = None
        self._process = 0

    def join_launcher_table(self, path: Path, rank: int) -> None:
        """Join the launcher's table, if there is one: before MPI is initialized."""
        with contextlib.suppress(OSError, ValueError):  # no table: as without a launcher
            self.join(open_heartbeat_table(path), rank)

    def meet(
        self,
        rank: int,
        ranks: int,
        share: Callable[[bytearray], object],
        barrier: Callable[[], object],
        timeout_s: float,
    ) -> None:
        """Share a table with the ranks of this host, also without a launcher.

        Args:
            rank, ranks: this rank and the number of ranks, in the world.
            share: overwrites its argument by the first rank's. Collective.
            barrier: waits for all ranks. Collective.
            timeout_s: timeout of the new communicator, in seconds.

        Collective at its first call.
        """
        self.timeout_s = timeout_s
        if self._met or ranks == 1:
            return
        self._met = True
        memory = Path("/dev/shm")
        folder = memory if memory.is_dir() else Path(tempfile.gettempdir())
        share(token := bytearray(secrets.token_bytes(16)))
        path = folder / f"parallel_sgd-board-{token.hex()}"
        if self.heartbeat_table is None:
            with contextlib.suppress(OSError):  # no room: this rank has no heartbeat
                self.join(make_heartbeat_table(path, ranks), rank)
        barrier()  # all ranks have opened the file
        path.unlink(missing_ok=True)
        self.note(time.monotonic(), 0.0, 0.0, "")

    def join(self, heartbeat_table: HeartbeatTable, rank: int) -> None:
        """Write heartbeats to a table from now on."""
        if SHOW_STACKS:
            faulthandler.register(SHOW_STACKS, file=2, all_threads=True)
        now, self._process = time.monotonic(), os.getpid()
        birth = _birth(self._process)
        self.heartbeat_table, self._latest = (
            heartbeat_table,
            Heartbeat(rank, self._process, birth, now, now, 0.0, 0.0, ""),
        )
        heartbeat_table.write(self._latest)

    def note(self, now: float, moved: float, waits_since: float, name: str) -> None:
        """Write a heartbeat.

        Args:
            now: present time.
            moved: start of the latest wait.
            waits_since: start of the current wait; 0.0 without a wait.
            name: name of the current wait or standby.
        """
        if self._latest is None or self.heartbeat_table is None or os.getpid() != self._process:
            return
        old = self._latest
        if bool(old.waits_since) and not waits_since:  # a wait has ended
            moved = max(moved, now)
        moved, timeout_s = max(moved, old.moved), self.timeout_s
        heartbeat = replace(
            old, written=now, moved=moved, waits_since=waits_since, timeout_s=timeout_s, name=name
        )
        self._latest = heartbeat
        self.heartbeat_table.write(heartbeat)

    @property
    def rank(self) -> int | None:
        return None if self._latest is None else self._latest.rank

    def neighbours(self) -> list[Heartbeat]:
        """Return the heartbeats of all ranks of this host except this one."""
        heartbeats = [] if self.heartbeat_table is None else self.heartbeat_table.heartbeats()
        return [heartbeat for heartbeat in heartbeats if heartbeat.rank != self.rank]

    def failed_neighbours(self) -> list[Heartbeat]:
        """Return the heartbeats of ranks of this host whose process has exited."""
        now = time.monotonic()
        return [
            heartbeat for heartbeat in self.neighbours() if heartbeat.state(now) is RankState.EXITED
        ]


own = OwnHeartbeat()  #: heartbeat of this process


def _stat(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, or nothing without such a process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _birth(process: int) -> int:
    stat = _stat(process)
    return int(stat[19]) if stat else 0


def _process_state(process: int, birth: int) -> str | None:
    """Return the process state letter from /proc, or None if the process has exited."""
    stat = _stat(process)
    if not stat or int(stat[19]) != birth or stat[0] in "ZX":
        return None
    return stat[0]


def is_running(process: int) -> bool:
    """Return True if the process exists and is not exiting. Local."""
    stat = _stat(process)
    return bool(stat) and stat[0] not in "ZX" and not int(stat[6]) & _PF_EXITING
