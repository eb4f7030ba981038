"""A learner as it was: kept in memory, to try something and to go back."""

from __future__ import annotations

from ..learner import Learner
from ..recovery.snapshot import Copy, Sharing


class Snapshot:
    """All of a learner that a checkpoint would hold, in memory.

    It keeps the place of its arrays for the next `take`. Memory on each rank: its state, as much as
    a checkpoint has on the disk. Where ranks survive each other it may be of others than those that
    are left.
    """

    def __init__(self) -> None:
        self._copy = Copy()

    @property
    def taken(self) -> bool:
        """Whether there is anything to go back to. Local."""
        return self._copy.generation >= 0

    @property
    def samples(self) -> int:
        """Of all ranks, as it was taken. Local."""
        return self._copy.samples

    def discard(self) -> None:
        """There is nothing to go back to any more. Local."""
        self._copy.generation = -1

    def can_restore(self, learner: Learner) -> bool:
        """Whether it can be gone back to. With servers its parts are those of the ranks that there
        were: no more where one has died since. Local."""
        same = self._copy.generation == learner.world.generation
        return self.taken and (same or learner.algorithm.roles.together)

    def take(self, learner: Learner) -> None:
        """See `Copy.take`."""
        recovery = learner.recovery
        self._copy.take(learner, recovery.sizes if recovery else [])

    def restore(self, learner: Learner) -> None:
        """See `Copy.put_back`. Collective also where ranks survive each other."""
        recovery, copy = learner.recovery, self._copy
        learner.discard_issued()
        same = copy.generation == learner.world.generation
        if recovery is None or same or not recovery.sizes:  # servers redistribute by themselves
            assert self.taken, "nothing was taken"
            copy.put_back(learner)
        else:
            Sharing(learner, copy if self.taken else None).put_back(learner, recovery.sizes)
            work = learner.runner
            work.algorithm.reconfigured(work.state, work.work)
        learner.skipped.went_back(learner.samples)
        if recovery is not None:
            recovery.went_back()  # nobody else goes to what has been given up
