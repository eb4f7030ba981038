"""Which rank of a job is gone first, and what it leaves behind, as `parallel-sgd run` sees it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import tempfile
from pathlib import Path

from ..communication.attendance import END, FAILED, MEMORY, PROCESS
from ..communication.launched import FOLDER

#: What MPICH may leave behind, and nothing else is removed.
_SHARED_MEMORY = re.compile(r"/dev/shm/mpich_shm[^/]*")

#: How many descriptors the launcher needs besides one for each rank.
_SPARE = 64


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

    def __enter__(self) -> Roll:
        self._folder = Path(tempfile.mkdtemp(prefix="parallel_sgd-"))
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
        except OSError:
            self._close_pipes()

    def look(self) -> None:
        """Take in who is gone since the last look, in that order. To be called every now and then:
        the kernel puts a pipe that is opened in line, too, until it has been looked at."""
        if self._pipes:
            self._gone += [self._pipes[pipe] for pipe, _ in self._ends.poll(0, self._ranks)]

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
        for path in self._folder.glob(f"*.{MEMORY}"):
            for name in filter(_SHARED_MEMORY.fullmatch, path.read_text().splitlines()):
                with contextlib.suppress(FileNotFoundError):  # the job has removed it itself
                    os.unlink(name)
        self._ends.close()
        self._close_pipes()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _close_pipes(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes.clear()


def _told_by(pipe: int) -> str:
    """The number of a rank's process; nothing where none has said it yet."""
    with contextlib.suppress(BlockingIOError):  # it has opened the pipe and no more
        return os.read(pipe, 64).decode().strip()
    return ""
