"""Read the ranks' reports to the launcher, from pipes and from files.

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..communication.liveness.rank_status import END_STATUSES, Status

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
