"""Whether a job is complete, by what its ranks have said, and never by mpiexec's exit code alone.

Open MPI's mpiexec gives 0 where a whole host is lost, and 1 or 137 where all that are left of
`--survive` have finished well.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ..communication.liveness.rank_status import FAILED, FINISHED, LOST, PREEMPTED
from .supervisor import Supervisor


class Ending(Enum):
    """How a job may have ended."""

    COMPLETE = auto()  #: the program has come to its end
    PREEMPTED = auto()  #: all ranks have left, as they were asked to
    FAILED = auto()  #: by its own word: it would do so again
    LOST = auto()  #: ranks were killed, have crashed, were silent, or could not be started


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        why: for what is LOST, in a few words; for what is COMPLETE, why no rank could say so.
        told: whether a rank has said anything, as far as the launcher can see.
        at_start: whether it is LOST before anything was trained on.
    """

    end: Ending
    why: str = ""
    told: bool = True
    at_start: bool = False


def judge(code: int, roll: Supervisor, *, survive: bool) -> Outcome:
    """How a job has ended.

    Args:
        code: mpiexec's.
        roll: of its ranks.
        survive: whether ranks may be lost, and the others go on.
    """
    said, killed = roll.said(), roll.killed()
    words = set(said.values())
    if PREEMPTED in words:  # all of them had agreed, and saved
        return Outcome(Ending.PREEMPTED)
    if roll.all_stopped is not None:
        return Outcome(Ending.LOST, roll.all_stopped)
    if roll.lost_at_start is not None:
        return Outcome(Ending.LOST, roll.lost_at_start, at_start=True)
    if survive and FINISHED in words and not words & {FAILED, LOST}:
        if roll.unfinished():
            return Outcome(Ending.LOST, _and_unfinished(killed or "ranks are lost"))
        return Outcome(Ending.COMPLETE)
    if killed is not None and not survive:
        return Outcome(Ending.LOST, killed)
    if LOST in words:
        ranks = ", ".join(str(rank) for rank in sorted(said) if said[rank] == LOST)
        return Outcome(Ending.LOST, f"a rank was silent or dead, as seen by rank {ranks}")
    if FAILED in words:
        return Outcome(Ending.FAILED)
    silent = roll.seen() - said.keys()  # a program without `Communicator.world` meets nobody
    told = roll.together() or not silent
    if not survive and said and ((code == 0 and told) or len(said) == roll.ranks):
        return Outcome(Ending.COMPLETE)
    if roll.is_deaf:
        gone = f"the folder {str(roll.folder)!r} is gone, by which ranks say how they end"
        if code == 0:
            return Outcome(Ending.COMPLETE, gone, told=False)
        return Outcome(Ending.LOST, f"mpiexec has ended (exit code {code}), and {gone}")
    if not survive and code == 0 and not roll.seen():
        return Outcome(Ending.COMPLETE, told=False)
    if code == 0 and survive and not said:
        return Outcome(Ending.LOST, "no rank has come to the end of the program")
    why = f"mpiexec has ended (exit code {code}), and the ranks have not said why"
    return Outcome(Ending.LOST, killed or why)


def _and_unfinished(why: str) -> str:
    return f"{why}, and nobody has finished its training session: no final model is saved"
