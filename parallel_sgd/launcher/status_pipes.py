"""What ranks tell the launcher: by the pipe that each of them holds open, else by files.

A pipe takes what is told without a folder, an inode or room on a disk. The launcher's folder may be
gone by then (what cleans temporary files removes it from under a long job), or the disk be full. A
rank on another host has no pipe: it writes files, if the hosts share the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..communication.liveness.rank_status import END_STATUSES, ERROR, PROCESS, SHARED_ERROR

_READS_BYTES = 1 << 16


@dataclass(frozen=True)
class Note:
    """What a rank has told.

    Attributes:
        what: one of the suffixes of `attendance`; some have a number before it ("3.begun").
        time_s: when, as `time.time` of its host tells it.
        text: more, for some.
    """

    rank: int
    what: str
    time_s: float
    text: str = ""


class Notes:
    """Those of one job's ranks.

    Args:
        folder: the launcher's.

    Holds a lock of the folder, which systemd-tmpfiles heeds. Local.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._told: dict[tuple[int, str], Note] = {}  # by pipes
        self._errors: list[Note] = []  # by pipes, since `errors`
        self._begun: dict[int, bytes] = {}  # the beginning of a line, by the pipe

    def take_in(self, pipes: Mapping[int, int]) -> None:
        """Read what ranks have written into their pipes since the last time.

        Args:
            pipes: the rank of each, by its descriptor.
        """
        for pipe, rank in pipes.items():
            data = self._begun.pop(pipe, b"")
            with contextlib.suppress(BlockingIOError):  # that is all, so far
                while more := os.read(pipe, _READS_BYTES):
                    data += more
            *lines, rest = data.split(b"\n")
            if rest:
                self._begun[pipe] = rest
            for line in lines:
                self._note(rank, line)

    def _note(self, rank: int, line: bytes) -> None:
        time_s, what, text = json.loads(line)
        if what.endswith((f".{ERROR}", f".{SHARED_ERROR}")):
            self._errors.append(Note(rank, what, time_s, text))
            return
        if (
            what in END_STATUSES
        ):  # which takes the place of another one: the rank knows which one holds
            for word in END_STATUSES:
                self._told.pop((rank, word), None)
        self._told[rank, what] = Note(rank, what, time_s, text)

    def errors(self) -> list[Note]:
        """Those that ranks have handed over since the last call."""
        errors, self._errors = self._errors, []
        return errors

    def of(self, *kinds: str) -> list[Note]:
        """All of these kinds, but `PROCESS`, the oldest first."""
        found = [note for note in self._told.values() if note.what.rpartition(".")[2] in kinds]
        paths = [path for kind in kinds for path in self.folder.glob(f"*.{kind}")]
        for path in paths:
            rank, _, what = path.name.partition(".")
            with contextlib.suppress(OSError):  # its rank has taken it back, or a disk fails
                text = os.fsdecode(path.read_bytes()).strip()
                found.append(Note(int(rank), what, path.stat().st_mtime, text))
        return sorted(found, key=lambda note: note.time_s)

    def ranks(self, *kinds: str) -> set[int]:
        """Those that have told any of these kinds."""
        return {note.rank for note in self.of(*kinds)}

    def process(self, rank: int) -> str:
        """The number of a rank's process on this host; nothing where none has said it yet."""
        note = self._told.get((rank, PROCESS))
        return "" if note is None else note.text

    @property
    def folder_is_there(self) -> bool:
        """Whether who has no pipe can tell anything."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._directory), self.folder.stat())
        return False

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._directory)
