"""Which rank of a job is gone first, and what it leaves behind, as `parallel-sgd run` sees it."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from ..communication.attendance import END, FAILED, MEMORY, PROCESS
from ..communication.launched import FOLDER

__all__ = ["Roll"]


class Roll:
    """The folder in which the ranks on this host sign on and off. A `with` block of one job.

    Args:
        ranks: how many the job has, here and elsewhere.

    Where some of them are on other hosts nobody is named: a rank there may have ended the job.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._watched: dict[int, int] = {}  # ranks, by the descriptor of their process
        self._gone: list[int] = []  # in that order
        self._processes: dict[int, int] = {}
        self._cannot_tell = False  # who is gone first

    def __enter__(self) -> Roll:
        self._folder = Path(tempfile.mkdtemp(prefix="parallel_sgd-"))
        self.environ = {FOLDER: str(self._folder)}  #: for the ranks
        self._ends = select.epoll()
        return self

    def look(self) -> None:
        """Take in who has signed on, and who is gone since the last look, in that order."""
        if self._cannot_tell:
            return
        try:
            if len(self._processes) < self._ranks:
                self._take_in()
            self._gone += [self._watched[descriptor] for descriptor, _ in self._ends.poll(0)]
        except (OSError, AttributeError):  # no descriptors of processes, or not as many
            self._cannot_tell = True
            self._close()

    def _take_in(self) -> None:
        """Watch the processes of the ranks that have signed on since the last look."""
        for path in self._folder.glob(f"*.{PROCESS}"):
            rank = int(path.stem)
            text = "" if rank in self._processes else path.read_text()
            if not text.endswith("\n"):
                continue
            self._processes[rank] = int(text)
            try:
                descriptor = os.pidfd_open(int(text))
            except ProcessLookupError:
                self._gone.append(rank)
                continue
            self._watched[descriptor] = rank
            self._ends.register(descriptor, select.EPOLLIN | select.EPOLLONESHOT)

    def gone_without_a_word(self) -> str | None:
        """Which rank that is, in a line; None where all have signed off, or it cannot be told."""
        self.look()
        said = {int(path.stem): path.read_text().strip() for path in self._folder.glob(f"*.{END}")}
        if FAILED in said.values() or len(self._processes) < self._ranks or self._cannot_tell:
            return None
        silent = [rank for rank in self._gone if rank not in said]
        if not silent:
            return None
        return (
            f"rank {silent[0]} (pid {self._processes[silent[0]]}) was gone first, without a "
            "word: it was killed (for its memory, say), has crashed, or has called os._exit or "
            "MPI_Abort"
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for path in self._folder.glob(f"*.{MEMORY}"):
            for name in path.read_text().splitlines():
                with contextlib.suppress(FileNotFoundError):  # the job has removed it itself
                    os.unlink(name)
        self._close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _close(self) -> None:
        self._ends.close()
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched.clear()
