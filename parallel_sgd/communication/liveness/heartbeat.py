"""What the ranks of one host are doing, in memory that all of them and their launcher see.

Twice a second the watchdog's thread of each rank writes a line on the board: that it runs, in what
its rank waits for others, and when that has last changed. So the hot path pays nothing, and who
does not write any more has been stopped, or holds Python's lock. Everything here is local.
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
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

FILE = "board"  #: in the launcher's folder
NAME_BYTES = 64

#: process, birth, written, moved, waits since (0: it does not), timeout_s (0: MPI is not up), name
#: of what it waits in, or stands by for
_FIELDS = struct.Struct(f"=qqdddd{NAME_BYTES}s")

#: What a copy of a line begins with: the checksum of all that follows; how often it was written.
_HEAD = struct.Struct("=IQ")
_CHECKSUM = struct.Struct("=I")
_COPY_BYTES = 128
assert _HEAD.size + _FIELDS.size <= _COPY_BYTES

LINE_BYTES = 2 * _COPY_BYTES
_EMPTY = bytes(LINE_BYTES)  #: of a rank that has not written yet, or is on another host

#: How often a reader looks for a whole copy. It finds none after as many looks only where a rank
#: has been stopped in the midst of its very first line.
_LOOKS = 1000

#: A rank that has written within so many seconds answers; it does so twice a second.
FRESH_S = 2.0

#: At this signal a process writes its stacks to stderr, also where Python's lock is held; 0 does
#: nothing, where there are no such signals. Not one that programs or batch systems have a use for.
SHOW_STACKS = signal.SIGRTMIN + 9 if sys.platform.startswith("linux") else 0


#: How long a process may take to write its stacks.
SHOWN_S = 0.5

#: Of a process's flags, as Linux says them: set before anything is closed for its end.
_PF_EXITING = 0x4


class RankState(Enum):
    """What a rank does, as its host sees it."""

    EXITED = "is gone"
    STOPPED = "is stopped, by a signal or a debugger"
    SILENT = "does not answer: it holds Python's lock, or gets no core"
    STARTS = "has not come to Communicator.world()"
    WAITS = "waits for others"
    STANDS_BY = "stands by"
    COMPUTES = "computes, reads or sleeps"


NOT_ANSWERING = {RankState.STOPPED, RankState.SILENT, RankState.STARTS}
ANSWERING = {RankState.WAITS, RankState.STANDS_BY, RankState.COMPUTES}


@dataclass(frozen=True)
class Heartbeat:
    """One rank's, with times of the host's monotonic clock.

    Attributes:
        rank: of the world.
        birth: when the process was started, in ticks: another one may get its number.
        written: when the rank wrote it.
        moved: when it has last begun or ended a wait for others.
        waits_since: since when it waits; 0.0: it does not.
        timeout_s: of its communicator; 0.0 before MPI is up.
        name: of what it waits in, or stands by for.
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
        """What it does."""
        process_state = _process_state(self.process, self.birth)
        if process_state is None:
            return RankState.EXITED
        if process_state in "Tt":
            return RankState.STOPPED
        if self.waits_since and not self.timeout_s:  # in MPI_Init, with Python's lock held
            return RankState.WAITS
        if not self.timeout_s:
            return RankState.STARTS
        if now - self.written > FRESH_S:
            return RankState.SILENT
        if self.waits_since:
            return RankState.WAITS
        return RankState.STANDS_BY if self.name else RankState.COMPUTES

    def in_words(self, now: float) -> str:
        """Which process it is and what it does, for a message."""
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
        """From when on it has done that, at the latest."""
        if state is RankState.WAITS:
            return self.waits_since
        return self.written if state in (RankState.STOPPED, RankState.SILENT) else self.moved

    def signal(self, number: int) -> bool:
        """Send the process a signal, if it still is there; whether it was."""
        if _process_state(self.process, self.birth) is None:
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.process, number)
            return True
        return False


class HeartbeatTable:
    """A line for each rank of the world, of which those on this host are written.

    A line is there twice, and its rank writes the older copy: the other one stays whole, also where
    the rank is stopped in the midst of writing. A reader takes the newer copy whose checksum is
    right. So it needs nothing of the order in which another core sees the bytes, which differs
    between processors, and which Python cannot ask for.

    Args:
        memory: `LINE_BYTES` for each rank.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self.size = memory, len(memory) // LINE_BYTES

    def write(self, line: Heartbeat) -> None:
        if line.rank >= self.size:
            return
        at = line.rank * LINE_BYTES
        written = max((number for number, _ in self._copies(at)), default=0) + 1
        numbers = (line.process, line.birth, line.written, line.moved, line.waits_since)
        fields = _FIELDS.pack(*numbers, line.timeout_s, line.name.encode()[:NAME_BYTES])
        copy = bytearray(_HEAD.pack(0, written) + fields)
        _CHECKSUM.pack_into(copy, 0, zlib.crc32(copy[_CHECKSUM.size :]))
        at += written % 2 * _COPY_BYTES
        self._memory[at : at + len(copy)] = bytes(copy)

    def lines(self) -> list[Heartbeat]:
        """Of the ranks on this host that have written any, in their order."""
        return [line for rank in range(self.size) if (line := self._line(rank)) is not None]

    def _line(self, rank: int) -> Heartbeat | None:
        """The newest whole line of a rank; None: it has written none."""
        at = rank * LINE_BYTES
        for _ in range(_LOOKS):
            if self._memory[at : at + LINE_BYTES] == _EMPTY:
                return None
            if copies := self._copies(at):
                _, (process, birth, written, moved, waits_since, timeout_s, name) = max(copies)
                text = name.rstrip(b"\0").decode(errors="replace")
                return Heartbeat(rank, process, birth, written, moved, waits_since, timeout_s, text)
        return None

    def _copies(self, at: int) -> list[tuple[int, tuple[Any, ...]]]:
        """The whole copies of the line that begins there: how often it was written, its fields."""
        memory, found = self._memory[at : at + LINE_BYTES], []
        for begin in (0, _COPY_BYTES):
            copy = memory[begin : begin + _HEAD.size + _FIELDS.size]
            checksum, number = _HEAD.unpack_from(copy)
            if number and checksum == zlib.crc32(copy[_CHECKSUM.size :]):
                found.append((number, _FIELDS.unpack_from(copy, _HEAD.size)))
        return found


def make_heartbeat_table(path: Path, ranks: int) -> HeartbeatTable:
    """A new one, or the one that is there, in a file that nobody else may open."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, ranks * LINE_BYTES)  # an error where there is no room
        return HeartbeatTable(mmap.mmap(descriptor, ranks * LINE_BYTES))
    finally:
        os.close(descriptor)


def open_heartbeat_table(path: Path) -> HeartbeatTable:
    """The one that is there. Raises OSError or ValueError where there is none."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return HeartbeatTable(mmap.mmap(descriptor, 0))
    finally:
        os.close(descriptor)


class OwnHeartbeat:
    """This process's line, on the board of its host if it has one."""

    def __init__(self) -> None:
        self.heartbeat_table: HeartbeatTable | None = None
        self.timeout_s = 0.0  #: of this process's latest communicator, once MPI is up
        self._met = False
        self._line: Heartbeat | None = None
        self._process = 0

    def join_launcher_table(self, path: Path, rank: int) -> None:
        """Be on the launcher's board, where there is one: before MPI is up."""
        with contextlib.suppress(OSError, ValueError):  # there is none: as without a launcher
            self.join(open_heartbeat_table(path), rank)

    def meet(self, world: MPI.Intracomm, timeout_s: float) -> None:
        """Be on one board with the other ranks of this host, also without a launcher. Collective
        at its first call.

        Args:
            timeout_s: of the communicator that is being made.
        """
        self.timeout_s = timeout_s
        if self._met or world.size == 1:
            return
        self._met = True
        memory = Path("/dev/shm")
        folder = memory if memory.is_dir() else Path(tempfile.gettempdir())
        world.Bcast(token := bytearray(secrets.token_bytes(16)))
        path = folder / f"parallel_sgd-board-{token.hex()}"
        if self.heartbeat_table is None:
            with contextlib.suppress(OSError):  # no room: then this rank is not seen
                self.join(make_heartbeat_table(path, world.size), world.rank)
        world.Barrier()  # all have opened it
        path.unlink(missing_ok=True)
        self.note(time.monotonic(), 0.0, 0.0, "")

    def join(self, heartbeat_table: HeartbeatTable, rank: int) -> None:
        """Write on a board from now on."""
        if SHOW_STACKS:
            faulthandler.register(SHOW_STACKS, file=2, all_threads=True)
        now, self._process = time.monotonic(), os.getpid()
        birth = _birth(self._process)
        self.heartbeat_table, self._line = (
            heartbeat_table,
            Heartbeat(rank, self._process, birth, now, now, 0.0, 0.0, ""),
        )
        heartbeat_table.write(self._line)

    def note(self, now: float, moved: float, waits_since: float, name: str) -> None:
        """What this rank does now; `moved`: when it has last begun a wait."""
        if self._line is None or self.heartbeat_table is None or os.getpid() != self._process:
            return
        old = self._line
        if bool(old.waits_since) and not waits_since:  # that wait has ended since
            moved = max(moved, now)
        moved, timeout_s = max(moved, old.moved), self.timeout_s
        line = replace(
            old, written=now, moved=moved, waits_since=waits_since, timeout_s=timeout_s, name=name
        )
        self._line = line
        self.heartbeat_table.write(line)

    @property
    def rank(self) -> int | None:
        return None if self._line is None else self._line.rank

    def neighbours(self) -> list[Heartbeat]:
        """The other ranks of this host."""
        lines = [] if self.heartbeat_table is None else self.heartbeat_table.lines()
        return [line for line in lines if line.rank != self.rank]

    def failed_neighbours(self) -> list[Heartbeat]:
        """Those of them whose process is no more."""
        now = time.monotonic()
        return [line for line in self.neighbours() if line.state(now) is RankState.EXITED]


own = OwnHeartbeat()  #: this process's


def _stat(process: int) -> list[str]:
    """What Linux says of a process, from its state on; nothing where there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _birth(process: int) -> int:
    stat = _stat(process)
    return int(stat[19]) if stat else 0


def _process_state(process: int, birth: int) -> str | None:
    """The letter of its state; None where it is no more."""
    stat = _stat(process)
    if not stat or int(stat[19]) != birth or stat[0] in "ZX":
        return None
    return stat[0]


def is_running(process: int) -> bool:
    """Whether there is such a process, and it is not about to end. Local."""
    stat = _stat(process)
    return bool(stat) and stat[0] not in "ZX" and not int(stat[6]) & _PF_EXITING
