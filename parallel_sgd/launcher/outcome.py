"""Judge the outcome of a job by the reports of its ranks, never by mpiexec's exit code alone.

Open MPI's mpiexec exits with 0 if a whole host fails, and with 1 or 137 if all remaining ranks of a
`--survive` job have finished well.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ..communication.liveness.rank_status import FAILED, FINISHED, LOST, PREEMPTED
from .supervisor import Supervisor


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


def judge(code: int, supervisor: Supervisor, *, survive: bool) -> Outcome:
    """Return the outcome of a job that has ended.

    Args:
        code: mpiexec's exit code.
        supervisor: the reports of the job's ranks.
        survive: True if remaining ranks go on after a failure (`--survive`).
    """
    exit_reasons, killed_rank = supervisor.exit_reasons(), supervisor.killed_rank()
    reasons = set(exit_reasons.values())
    if PREEMPTED in reasons:  # reported only after all ranks have agreed and saved
        return Outcome(Ending.PREEMPTED)
    if supervisor.all_stopped is not None:
        return Outcome(Ending.LOST, supervisor.all_stopped)
    if supervisor.failed_at_start is not None:
        return Outcome(Ending.LOST, supervisor.failed_at_start, at_start=True)
    if survive and FINISHED in reasons and not reasons & {FAILED, LOST}:
        if supervisor.has_unfinished_session():
            return Outcome(Ending.LOST, _unfinished_session(killed_rank or "ranks are lost"))
        return Outcome(Ending.COMPLETE)
    if killed_rank is not None and not survive:
        return Outcome(Ending.LOST, killed_rank)
    if LOST in reasons:
        ranks = ", ".join(str(rank) for rank in sorted(exit_reasons) if exit_reasons[rank] == LOST)
        return Outcome(Ending.LOST, f"a rank was silent or dead, as seen by rank {ranks}")
    if FAILED in reasons:
        return Outcome(Ending.FAILED)
    # No rank of a program without Communicator.world sees all ranks finish.
    silent = supervisor.signed_on() - exit_reasons.keys()
    reported = supervisor.saw_all_finish() or not silent
    if (
        not survive
        and exit_reasons
        and ((code == 0 and reported) or len(exit_reasons) == supervisor.ranks)
    ):
        return Outcome(Ending.COMPLETE)
    if supervisor.may_miss_reports:
        folder_gone = (
            f"the folder {str(supervisor.folder)!r} is gone, by which ranks say how they end"
        )
        if code == 0:
            return Outcome(Ending.COMPLETE, folder_gone, reported=False)
        return Outcome(Ending.LOST, f"mpiexec has ended (exit code {code}), and {folder_gone}")
    if not survive and code == 0 and not supervisor.signed_on():
        return Outcome(Ending.COMPLETE, reported=False)
    if code == 0 and survive and not exit_reasons:
        return Outcome(Ending.LOST, "no rank has come to the end of the program")
    why = f"mpiexec has ended (exit code {code}), and the ranks have not said why"
    return Outcome(Ending.LOST, killed_rank or why)


def _unfinished_session(why: str) -> str:
    return f"{why}, and nobody has finished its training session: no final model is saved"
