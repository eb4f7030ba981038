"""Judge the outcome of a job by the reports of its ranks, never by mpiexec's exit code alone.

Open MPI's mpiexec exits with 0 if a whole host fails, and with 1 or 137 if all remaining ranks of a
`--survive` job have finished well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from ..communication.liveness.rank_status import Status


class Ending(Enum):
    """The ways in which a job can end."""

    COMPLETE = auto()  #: the program has reached its end
    PREEMPTED = auto()  #: all ranks have saved their state and left, after a preemption notice
    FAILED = auto()  #: the program has reported an error: a restart would fail again
    LOST = auto()  #: ranks were killed, crashed, unresponsive, or could not be started


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job, and its reason.

    Attributes:
        why: for LOST, the reason in a few words. For COMPLETE, the reason why no rank could report.
        reported: True if a report of any rank has reached the launcher.
        at_start: True if the job was LOST before any training.
    """

    end: Ending
    why: str = ""
    reported: bool = True
    at_start: bool = False


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The launcher's knowledge of a job whose mpiexec has ended.

    Attributes:
        ranks: the number of ranks of the job.
        launcher: the name of the program that started the ranks.
        mpiexec_code: mpiexec's exit code.
        end_statuses: the reported end by rank, of `rank_status.END_STATUSES`.
        signed_on: the ranks known to have signed on and able to report their end.
        killed: a description of the rank that exited without a report before any failure, or None.
        failed_at_start: likewise, before the ranks of a `--survive` job had a learner, or None.
        all_stopped: a description of the stop of all ranks, which has ended the job, or None.
        saw_all_finish: True if a rank has seen all ranks finish.
        has_unfinished_session: True if a training session has begun, and no rank has finished it.
        lost_folder: the launcher's folder, if it was removed and reports may be lost; else None.
    """

    ranks: int
    mpiexec_code: int
    launcher: str = "mpiexec"
    end_statuses: Mapping[int, Status] = field(default_factory=dict)
    signed_on: frozenset[int] = frozenset()
    killed: str | None = None
    failed_at_start: str | None = None
    all_stopped: str | None = None
    saw_all_finish: bool = False
    has_unfinished_session: bool = False
    lost_folder: str | None = None

    def ended_with(self, *statuses: Status) -> list[int]:
        """Return the ranks that have ended with one of these statuses, in ascending order."""
        return sorted(rank for rank, status in self.end_statuses.items() if status in statuses)

    def any_ended(self, *statuses: Status) -> bool:
        """Return True if any rank has ended with one of these statuses."""
        return bool(self.ended_with(*statuses))

    @property
    def all_reported(self) -> bool:
        """True if all ranks that could report their end have done so, or have seen it.

        No rank of a program without `Communicator.world` sees all ranks finish.
        """
        return self.saw_all_finish or self.signed_on <= self.end_statuses.keys()


def judge(job: JobStatus, *, survive: bool) -> Outcome:
    """Return the outcome of a job. The first condition that holds decides.

    Args:
        job: the status of the job.
        survive: True if remaining ranks go on after a failure (`--survive`).
    """
    code = job.mpiexec_code
    if job.any_ended(Status.PREEMPTED):  # reported only after all ranks have agreed and saved
        return Outcome(Ending.PREEMPTED)
    if job.all_stopped is not None:
        return Outcome(Ending.LOST, job.all_stopped)
    if job.failed_at_start is not None:
        return Outcome(Ending.LOST, job.failed_at_start, at_start=True)
    if survive and job.any_ended(Status.FINISHED) and not job.any_ended(Status.FAILED, Status.LOST):
        if not job.has_unfinished_session:
            return Outcome(Ending.COMPLETE)
        no_model = "no rank has finished its training session: no final model is saved"
        return Outcome(Ending.LOST, f"{job.killed or 'ranks have failed'}, and {no_model}")
    if job.killed is not None and not survive:
        return Outcome(Ending.LOST, job.killed)
    if lost := job.ended_with(Status.LOST):
        ranks = ", ".join(map(str, lost))
        return Outcome(
            Ending.LOST, f"a rank was unresponsive or has failed, as seen by rank {ranks}"
        )
    if job.any_ended(Status.FAILED):
        return Outcome(Ending.FAILED)
    succeeded = code == 0 and job.all_reported
    if not survive and job.end_statuses and (succeeded or len(job.end_statuses) == job.ranks):
        return Outcome(Ending.COMPLETE)
    if job.lost_folder is not None:
        gone = f"the folder {job.lost_folder!r}, in which ranks report how they end, was removed"
        if code == 0:
            return Outcome(Ending.COMPLETE, gone, reported=False)
        return Outcome(Ending.LOST, f"{job.launcher} has ended (exit code {code}), and {gone}")
    if code == 0 and not survive and not job.signed_on:
        return Outcome(Ending.COMPLETE, reported=False)
    if code == 0 and survive and not job.end_statuses:
        return Outcome(Ending.LOST, "no rank has finished the program")
    why = f"{job.launcher} has ended (exit code {code}), and the ranks have not reported why"
    return Outcome(Ending.LOST, job.killed or why)
