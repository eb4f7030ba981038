"""Which rank of a job is gone first, and what it leaves behind, as `parallel-sgd run` sees it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path

from ..communication.attendance import END, FAILED, MEMORY, PROCESS
from ..communication.board import FILE, SHOW_STACKS, Board, Conduct, make_board
from ..communication.communicator import TIMEOUT_S
from ..communication.launched import FOLDER

#: What MPICH may leave behind, and nothing else is removed.
_SHARED_MEMORY = re.compile(r"/dev/shm/mpich_shm[^/]*")

_PREFIX, _LOCK = "parallel_sgd-", "lock"  #: of the folder; in it

#: How many descriptors the launcher needs besides one for each rank.
_SPARE = 64

#: A job of which a rank has said that it fails ends within so many seconds, or is ended.
_ENDS_S = 20.0

#: How long ranks may take to write their stacks.
_SHOWN_S = 0.5

#: How often the launcher looks what the ranks do. Where it was stopped itself that does not count.
_LOOKS_EVERY_S = 1.0


class Roll:
    """The folder in which the ranks on this host sign on and off. A `with` block of one job.

    Each rank holds the writing end of a pipe for as long as it lives, and the kernel keeps the
    order in which those ends are closed. That comes before mpiexec hears of a rank's end and kills
    the others; the end of a process itself, as process descriptors tell it, may come after.

    Args:
        ranks: how many the job has, here and elsewhere.

    Where some of them are on other hosts nobody is named: a rank there may have ended the job.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._pipes: dict[int, int] = {}  # ranks, by the descriptor of their pipe
        self._gone: list[int] = []  # in that order
        self._board: Board | None = None
        self._looked = time.monotonic()
        self._failed_s = self._stopped_s = 0.0  # for how long a rank has, or all are

    def __enter__(self) -> Roll:
        remove_leftovers()
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        new = self._folder / f"{_LOCK}.new"
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which nobody else knows yet
        new.rename(self._folder / _LOCK)
        self.environ = {FOLDER: str(self._folder)}  #: for the ranks
        self._ends = select.epoll()
        if self._ranks + _SPARE <= os.sysconf("SC_OPEN_MAX"):
            self._watch()
        return self

    def _watch(self) -> None:
        """Make a pipe for each rank; none where there cannot be one for each."""
        try:
            for rank in range(self._ranks):
                path = self._folder / f"{rank}.{PROCESS}"
                os.mkfifo(path)
                pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                self._pipes[pipe] = rank
                self._ends.register(pipe, select.EPOLLHUP | select.EPOLLONESHOT)
            self._board = make_board(self._folder / FILE, self._ranks)
        except OSError:
            self._close_pipes()

    def look(self) -> None:
        """Take in who is gone since the last look, in that order. To be called every now and then:
        the kernel puts a pipe that is opened in line, too, until it has been looked at."""
        if self._pipes:
            self._gone += [self._pipes[pipe] for pipe, _ in self._ends.poll(0, self._ranks)]

    def does_not_end(self) -> str | None:
        """Why the job has to be ended, in a line, where no rank can do that; None where it goes on.
        To be asked every now and then."""
        now = time.monotonic()
        if self._board is None or now - self._looked < _LOOKS_EVERY_S:
            return None
        self._looked = now
        failed = any(path.read_text().strip() == FAILED for path in self._folder.glob(f"*.{END}"))
        self._failed_s = self._failed_s + _LOOKS_EVERY_S if failed else 0.0
        if self._failed_s > _ENDS_S:
            return f"a rank has failed, and mpiexec has not ended the job within {_ENDS_S:g} s"
        lines = self._board.lines()
        conducts = {line.conduct(now) for line in lines}
        stopped = len(lines) == self._ranks and conducts == {Conduct.STOPPED}
        self._stopped_s = self._stopped_s + _LOOKS_EVERY_S if stopped else 0.0
        timeout_s = max((line.timeout_s for line in lines), default=0.0) or TIMEOUT_S
        if self._stopped_s > timeout_s:
            return f"all ranks have been stopped, for more than timeout_s={timeout_s:g} s"
        return None

    def show_stacks(self) -> None:
        """Have the ranks on this host write where they are, into their logs."""
        if self._signal(SHOW_STACKS):
            time.sleep(_SHOWN_S)

    def _signal(self, number: int) -> bool:
        """Send it to all ranks on this host; whether any of them still is there."""
        lines = [] if self._board is None else self._board.lines()
        reached = [line.signal(number) for line in lines]
        return any(reached)

    def gone_without_a_word(self) -> str | None:
        """Which rank that is, in a line; None where all have signed off, or it cannot be told. To
        be asked once, when the job has ended."""
        self.look()
        processes = {rank: _told_by(pipe) for pipe, rank in self._pipes.items()}
        said = {int(path.stem): path.read_text().strip() for path in self._folder.glob(f"*.{END}")}
        silent = [rank for rank in self._gone if rank not in said]
        if FAILED in said.values() or not silent or not all(processes.values()):
            return None
        return (
            f"rank {silent[0]} (pid {processes[silent[0]]}) was gone first, without a "
            "word: it was killed (for its memory, say), has crashed, or has called os._exit or "
            "MPI_Abort"
        )

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._signal(signal.SIGKILL)  # what mpiexec has left, where it was killed itself
        self._ends.close()
        self._close_pipes()
        _remove(self._folder)
        os.close(self._lock)

    def _close_pipes(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes.clear()


def remove_leftovers() -> None:
    """Remove what launchers that were killed have left behind on this host: their folders, and the
    shared memory of their ranks. A launcher that lives holds a lock."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's; or another launcher is quicker
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if {os.fstat(descriptor).st_uid, lock.parent.lstat().st_uid} == {os.geteuid()}:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(lock.parent)
            finally:
                os.close(descriptor)


def _remove(folder: Path) -> None:
    """A launcher's folder, and what its ranks have said that they leave behind."""
    for path in folder.glob(f"*.{MEMORY}"):
        for name in filter(_SHARED_MEMORY.fullmatch, path.read_text().splitlines()):
            with contextlib.suppress(OSError):  # the job has removed it itself
                os.unlink(name)
    shutil.rmtree(folder, ignore_errors=True)


def _told_by(pipe: int) -> str:
    """The number of a rank's process; nothing where none has said it yet."""
    with contextlib.suppress(BlockingIOError):  # it has opened the pipe and no more
        return os.read(pipe, 64).decode().strip()
    return ""
