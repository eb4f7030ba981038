"""The start of a job whose ranks survive each other: until they have made a learner, nobody does.

A rank that is gone before MPI is up is waited for by all others in MPI_Init, which no death ends
there. So the launcher ends such a job, and may start it again: nothing has been trained on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..communication.liveness.abort import GRACE_S
from ..communication.liveness.rank_status import EXITED, FAILED, LOST, ON, TRAINS
from .cleanup import ranks_running
from .status_pipes import Notes

#: Once a rank has signed on, mpiexec has made the processes of all others within so long.
_STARTS_S = 3.0


class StartupMonitor:
    """
    Args:
        notes: what the ranks tell.
        ranks: of the job.
        training: so many of them, the first ones, make a learner; the others are in reserve.
        here: whether all are on this host.

    Attributes:
        lost: which rank was gone without a word before it was over, in a few words.

    Local.
    """

    def __init__(self, notes: Notes, ranks: int, training: int, *, here: bool) -> None:
        self._notes, self._ranks, self._here = notes, ranks, here
        self._training = frozenset(range(training))
        self.lost: str | None = None
        self._over = False
        self._first_s: float | None = None  # when a rank had signed on
        self._missing: set[int] = set()  # at the last look

    @property
    def is_over(self) -> bool:
        """Whether a rank that trains has made a learner. All make it together: so MPI is up on all,
        and they go on by themselves, wherever one dies. (Some may be at work before others, which
        have as much to do yet, can say so.)"""
        self._over = self._over or bool(self._training & self._notes.ranks(TRAINS))
        return self._over

    def note_gone(
        self, processes: Mapping[int, str], said: Mapping[int, str], since_s: float
    ) -> None:
        """Ranks are gone.

        Args:
            processes: which they were, by rank, in the order in which they went.
            said: why ranks have ended, by rank, of those that have said it.
            since_s: when they were still there, as `time.time` tells it.
        """
        silent = [rank for rank in processes if rank not in said]
        if silent and not self._ended_by(since_s):
            self._lose(f"rank {silent[0]} ({processes[silent[0]]})")

    def _ended_by(self, time_s: float) -> bool:
        """Whether a rank may have ended the others by then, for a failure of the program or a wait
        in vain. (It waits before it does. Who hears of a death says LOST at once.)"""
        waits = [note.time_s + GRACE_S for note in self._notes.of(LOST)]
        return bool(self._notes.of(FAILED)) or min(waits, default=math.inf) < time_s

    def look(self, now: float, said: Mapping[int, str]) -> None:
        """Find ranks that were gone elsewhere; or before they could sign on, so that this host has
        no process of them. To be called every now and then.

        Args:
            now: on the monotonic clock.
            said: why ranks have ended, by rank, of those that have said it.
        """
        for note in self._notes.of(EXITED):
            self.note_gone({note.rank: "on another host"}, said, note.time_s)
        signed_on = self._notes.ranks(ON)
        if not self._here or self.is_over or not signed_on or len(signed_on) == self._ranks:
            return
        self._first_s = self._first_s or now
        if now - self._first_s < _STARTS_S:
            return
        before = self._missing
        self._missing = set(range(self._ranks)) - signed_on - ranks_running(self._notes.folder)
        if missing := self._missing & before:
            self._lose(f"rank {min(missing)}")

    def _lose(self, rank: str) -> None:
        if self.lost is None and not self.is_over:
            self.lost = f"{rank} was gone without a word before the ranks had made a learner"
