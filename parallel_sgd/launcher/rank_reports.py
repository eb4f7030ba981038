"""Collect the ranks' reports to the launcher, from pipes and from files, and print their errors.

Each rank on the launcher's host holds a pipe open and writes its reports into the pipe. A pipe
needs no folder, no inode and no room on a disk: during a long job the launcher's folder may be
removed (by a cleaner of temporary files), or the disk may fill up. A rank on a remote host has no
pipe: it writes files, if the hosts share the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..communication.liveness.rank_status import END_STATUSES, Status
from ..communication.phrases import in_brief
from ..communication.stderr import write_stderr

_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class RankReport:
    """A report of a rank.

    Attributes:
        kind: a `Status`, for some statuses with a number before it ("3.begun").
        time_s: the time of the report, by `time.time` of the rank's host.
        text: further text, for some kinds.
    """

    rank: int
    kind: str
    time_s: float
    text: str = ""


class RankReports:
    """All reports of one job's ranks.

    Args:
        folder: the launcher's folder.

    Holds a shared lock on the folder, respected by systemd-tmpfiles. Local.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # the file system has no locks
            # bounded: LOCK_NB
            fcntl.flock(self._directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._by_rank_and_kind: dict[tuple[int, str], RankReport] = {}  # received by pipes
        self._errors: list[RankReport] = []  # received by pipes, since `take_errors`
        self._partial_lines: dict[int, bytes] = {}  # incomplete lines, by pipe

    def read_pipes(self, pipes: Mapping[int, int]) -> None:
        """Read the reports that ranks have written into their pipes since the last call.

        Args:
            pipes: the rank by the descriptor of its pipe.
        """
        for pipe, rank in pipes.items():
            data = self._partial_lines.pop(pipe, b"")
            with contextlib.suppress(BlockingIOError):  # no more data for now
                while more := os.read(pipe, _READ_BYTES):
                    data += more
            *lines, rest = data.split(b"\n")
            if rest:
                self._partial_lines[pipe] = rest
            for line in lines:
                self._add(rank, line)

    def _add(self, rank: int, line: bytes) -> None:
        time_s, kind, text = json.loads(line)
        if kind.endswith((f".{Status.ERROR}", f".{Status.SHARED_ERROR}")):
            self._errors.append(RankReport(rank, kind, time_s, text))
            return
        if kind in END_STATUSES:  # replaces the rank's earlier reason of exit
            for word in END_STATUSES:
                self._by_rank_and_kind.pop((rank, word), None)
        self._by_rank_and_kind[rank, kind] = RankReport(rank, kind, time_s, text)

    def take_errors(self) -> list[RankReport]:
        """Return the errors received since the last call."""
        errors, self._errors = self._errors, []
        return errors

    def of_kinds(self, *kinds: Status) -> list[RankReport]:
        """Return all reports of these kinds, except `PROCESS`, the oldest first."""
        found = [
            report
            for report in self._by_rank_and_kind.values()
            if report.kind.rpartition(".")[2] in kinds
        ]
        paths = [path for kind in kinds for path in self.folder.glob(f"*.{kind}")]
        for path in paths:
            rank, _, kind = path.name.partition(".")
            with contextlib.suppress(OSError):  # withdrawn by its rank, or a disk error
                text = os.fsdecode(path.read_bytes()).strip()
                found.append(RankReport(int(rank), kind, path.stat().st_mtime, text))
        return sorted(found, key=lambda report: report.time_s)

    def ranks_with(self, *kinds: Status) -> set[int]:
        """Return the ranks with a report of any of these kinds."""
        return {report.rank for report in self.of_kinds(*kinds)}

    def pid(self, rank: int) -> str:
        """Return the process id of a rank on this host, or "" if the rank has not reported it."""
        report = self._by_rank_and_kind.get((rank, Status.PROCESS))
        return "" if report is None else report.text

    @property
    def folder_exists(self) -> bool:
        """True if the folder is still there, so that ranks without a pipe can report."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._directory), self.folder.stat())
        return False

    def close(self) -> None:
        """Close the folder, and release its lock."""
        os.close(self._directory)


#: An error is printed once no further rank has reported the same error for this time. Less than
#: `abort.GRACE_S`, so that the error is printed before mpiexec's own messages.
_QUIET_S = 0.3

#: The same for an error agreed by all ranks: a slow rank may report it late.
_SHARED_QUIET_S = 2.0


@dataclass
class _Error:
    """An error that is not printed yet.

    Attributes:
        ranks: the ranks with this error, in order of arrival.
        due: the time to print the error, on the monotonic clock.
    """

    ranks: list[int] = field(default_factory=list)
    due: float = 0.0


class RankErrors:
    """The errors of one job's ranks, as handed over by `rank_status.report_error`.

    No error is lost if some or all ranks fail: data in a pipe stays there. If a rank reports an
    error after the same error was printed, the line is printed again for this rank.

    Args:
        ranks: the number of ranks of the job.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._open: dict[str, _Error] = {}  # by the text of the error

    def take(self, reports: Sequence[RankReport]) -> None:
        """Add errors, and print those that are due. Call it regularly."""
        now = time.monotonic()
        for report in sorted(reports, key=lambda report: report.time_s):
            error = self._open.setdefault(report.text, _Error())
            if report.rank not in error.ranks:
                error.ranks.append(report.rank)
            shared = report.kind.endswith(Status.SHARED_ERROR)
            error.due = now + (_SHARED_QUIET_S if shared else _QUIET_S)
        for text, error in list(self._open.items()):
            if error.due <= now or len(error.ranks) == self._ranks:
                self._print(text)

    def print_rest(self) -> None:
        """Print all remaining errors, at the end of the job."""
        for text in list(self._open):
            self._print(text)

    def _print(self, text: str) -> None:
        label = in_brief(sorted(self._open.pop(text).ranks))
        write_stderr(*(f"[{label}] {line}" for line in text.splitlines()))
