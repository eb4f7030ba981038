"""Watch the start of a fault-tolerant job, until its ranks have made a learner.

Until then no failure is survived: if a rank exits before MPI is up, all remaining ranks wait for it
in MPI_Init without end. So the launcher ends such a job, and may start it again: nothing has been
trained yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..communication.liveness.abort import GRACE_S
from ..communication.liveness.rank_status import Status
from .cleanup import ranks_running
from .rank_reports import RankReports

#: Once a rank has signed on, mpiexec has started the processes of all ranks within this time.
_SIGN_ON_TIMEOUT_S = 3.0


class StartupMonitor:
    """Find ranks failing before the ranks of a fault-tolerant job have made their learner.

    Args:
        reports: the ranks' reports.
        ranks: the number of ranks of the job.
        training: the number of ranks in training, the first ones; the remaining ranks are spares.
        local: True if all ranks run on this host.

    Attributes:
        failure: a description of the rank that exited without a report during the start, or None.

    Local.
    """

    def __init__(self, reports: RankReports, ranks: int, training: int, *, local: bool) -> None:
        self._reports, self._ranks, self._local = reports, ranks, local
        self._training = frozenset(range(training))
        self.failure: str | None = None
        self._started = False
        self._first_sign_on_s: float | None = None  # time of the first sign-on
        self._missing: set[int] = set()  # at the last check

    @property
    def has_started(self) -> bool:
        """True if a rank in training has made a learner: from then on failures are survived.

        All ranks make the learner together, so MPI is up on every rank. Some ranks may report the
        learner later than the first, because each has work to do before its report.
        """
        self._started = self._started or bool(
            self._training & self._reports.ranks_with(Status.TRAINS)
        )
        return self._started

    def record_exits(
        self, processes: Mapping[int, str], exit_reasons: Mapping[int, Status], since_s: float
    ) -> None:
        """Record ranks that have exited.

        Args:
            processes: a description of each process by rank, in the order of exit.
            exit_reasons: the reported reason of exit by rank.
            since_s: a time at which these ranks still ran, by `time.time`.
        """
        silent = [rank for rank in processes if rank not in exit_reasons]
        if silent and not self._was_reported_before(since_s):
            self._set_failure(f"rank {silent[0]} ({processes[silent[0]]})")

    def _was_reported_before(self, time_s: float) -> bool:
        """Return True if a rank may have ended the job by then, after an error or a timeout.

        After a timeout a rank reports LOST, waits `GRACE_S`, and then ends the job. A rank notified
        of a failure by MPI reports LOST at once.
        """
        waits = [report.time_s + GRACE_S for report in self._reports.of_kinds(Status.LOST)]
        return bool(self._reports.of_kinds(Status.FAILED)) or min(waits, default=math.inf) < time_s

    def check(self, now: float, exit_reasons: Mapping[int, Status]) -> None:
        """Find ranks that have exited on remote hosts or before signing on. Call it regularly.

        A rank without a sign-on is noticed by the absence of its process on this host.

        Args:
            now: the time, by the monotonic clock.
            exit_reasons: the reported reason of exit by rank.
        """
        for report in self._reports.of_kinds(Status.EXITED):
            self.record_exits({report.rank: "on another host"}, exit_reasons, report.time_s)
        signed_on = self._reports.ranks_with(Status.STARTED)
        if not self._local or self.has_started or not signed_on or len(signed_on) == self._ranks:
            return
        self._first_sign_on_s = self._first_sign_on_s or now
        if now - self._first_sign_on_s < _SIGN_ON_TIMEOUT_S:
            return
        before = self._missing
        self._missing = set(range(self._ranks)) - signed_on - ranks_running(self._reports.folder)
        if missing := self._missing & before:
            self._set_failure(f"rank {min(missing)}")

    def _set_failure(self, rank: str) -> None:
        if self.failure is None and not self.has_started:
            self.failure = f"{rank} ended without a report before the ranks had made a learner"
