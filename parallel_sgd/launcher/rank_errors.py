"""Print the errors of ranks: once what several ranks say, with their numbers before it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..communication.liveness.rank_status import SHARED_ERROR
from ..communication.phrases import in_brief
from ..communication.stderr import write_stderr
from .status_pipes import Note

#: An error is printed when no further rank has said the same for so many seconds: less than
#: `abort.GRACE_S`, so that it stands before what mpiexec says of the end.
_ALONE_S = 0.3

#: Of an error that all ranks share: ranks wait for each other with it, and a slow one is late.
_SHARED_S = 2.0


@dataclass
class _Error:
    """An error that is not printed yet.

    Attributes:
        ranks: that have said it, in the order in which they came.
        due: when it is to be printed, on the monotonic clock.
    """

    ranks: list[int] = field(default_factory=list)
    due: float = 0.0


class RankErrors:
    """The errors of one job's ranks, as they hand them over (`attendance.report_error`).

    Nothing is lost where a rank fails, or all of them: what is in a pipe stays there. A rank that
    says the same when it is printed already has the line printed again, for itself.

    Args:
        ranks: how many the job has.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._open: dict[str, _Error] = {}  # by their text

    def take(self, notes: Sequence[Note]) -> None:
        """Take in errors, and print those whose time has come. To be called every now and then."""
        now = time.monotonic()
        for note in sorted(notes, key=lambda note: note.time_s):
            error = self._open.setdefault(note.text, _Error())
            if note.rank not in error.ranks:
                error.ranks.append(note.rank)
            shared = note.what.endswith(SHARED_ERROR)
            error.due = now + (_SHARED_S if shared else _ALONE_S)
        for text, error in list(self._open.items()):
            if error.due <= now or len(error.ranks) == self._ranks:
                self._print(text)

    def print_rest(self) -> None:
        """Print all that is left, at the end of the job."""
        for text in list(self._open):
            self._print(text)

    def _print(self, text: str) -> None:
        label = in_brief(sorted(self._open.pop(text).ranks))
        write_stderr(*(f"[{label}] {line}" for line in text.splitlines()))
