"""Print the errors of ranks. An error of several ranks is printed once, after their numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..communication.liveness.rank_status import Status
from ..communication.phrases import in_brief
from ..communication.stderr import write_stderr
from .status_pipes import RankReport

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
