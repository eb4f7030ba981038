"""A learner as it was: kept in memory, to try something and to go back."""

from __future__ import annotations

from .learner import Learner
from .state_tree import HostCopies, capture, flatten, restore, unflatten


class Snapshot:
    """All of a learner that a checkpoint would hold, in memory.

    It keeps the place of its arrays for the next `take`. Memory on each rank: its state, as much as
    a checkpoint has on the disk.
    """

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._tree: dict[str, object] | None = None
        self._arrays: dict[str, object] = {}

    @property
    def taken(self) -> bool:
        """Whether there is anything to go back to. Local."""
        return self._tree is not None

    def take(self, learner: Learner) -> None:
        """Keep what the learner is now, between two steps; training is not affected. Collective
        where servers hold a part of it; else local. Cost: one pass over memory."""
        self._tree, live = flatten(capture(learner))
        self._arrays = dict(self._copies.of(live))

    def restore(self, learner: Learner) -> None:
        """Make the learner what it was, its place in the data included. Collective likewise."""
        assert self._tree is not None, "nothing was taken"
        learner.forget_announced()
        restore(learner, unflatten(self._tree, self._arrays))  # type: ignore[arg-type]
