"""What every learner does whose ranks survive each other: notice deaths, and form a group anew."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ...communication import Communicator, is_rank_failure, reconfigure_ranks
from ...communication.liveness.failure import MOST_FRUITLESS


class Recovery(ABC):
    """Lets a learner go on without ranks that have died.

    Args:
        learner: whose ranks survive each other (a `Learner`).

    What concerns copies does nothing here: for learners that keep none, since nobody goes back.

    Attributes:
        by_itself: whether no session trains, which keeps a place of its own.
        times: that training has gone back.
        has_joined: whether this rank had no state when training went on last.
        sizes: of all ranks' stripes.
    """

    def __init__(self, learner: Any) -> None:
        self._learner = learner
        self._generation, self._fruitless = learner.world.generation, 0
        self.sizes: list[dict[str, int]] = []
        self.by_itself, self.has_joined, self.times = True, False, 0

    @abstractmethod
    def recover(self, *, allow_join: bool = True) -> None:
        """Go on with the ranks that are left.

        Args:
            grows: whether ranks in reserve may join.

        Collective among them. Where more die meanwhile, it begins anew.
        """

    def keep(self, companion: Callable[[], Any]) -> Any:
        """A session begins, or begins again: keep something beside each copy, from now on. A step
        takes no copy by itself any more, but the session, when it has done what follows from a
        step (`stepped`). Local.

        Args:
            companion: gives it, as JSON can hold it.
        Returns:
            What was kept beside the copy that training has gone back to; None where it has not.
        """
        self.by_itself = False

    def keep_nothing(self) -> None:
        """It has ended. Local."""
        self.by_itself = True

    def end_session(self) -> bool:
        """It has ended: see that none goes back into it any more; False where ranks have died, and
        it has to go on. Collective where there are copies."""
        self.keep_nothing()
        return self.complete_pass()

    def paused(self) -> AbstractContextManager[None]:
        """For a `with` block no copies are taken: of what is only tried. Local."""
        return nullcontext()

    def stepped(self) -> None:  # noqa: B027
        """A step has been taken. Local."""

    def commit(self) -> None:  # noqa: B027
        """Take a copy now. Local."""

    def went_back(self) -> None:  # noqa: B027
        """The program has made the state another one: ranks that die take nobody back behind
        that. Collective where there are copies."""

    def set_back(self, name: str) -> None:  # noqa: B027
        """Make one of the learner's states again what it is in the latest copy. Local."""

    def complete_pass(self) -> bool:
        """All has been trained on that a source has given: see that none goes back behind it any
        more; False where ranks have died, and training has gone back to before. Collective where
        there are copies."""
        return True

    def give_up(self) -> None:
        """Ranks have died, and nothing of what is under way is needed any more. Local."""
        if self._learner.world.generation == self._generation:
            self._learner.world.revoke()
        self._learner.abandon()

    def _require_loss(self, error: Exception) -> None:
        """Raise the error again, unless ranks have died and the others can go on. Local."""
        if not is_rank_failure(error) or self._fruitless > MOST_FRUITLESS:
            raise error

    def _reconfigure(self, *, allow_join: bool) -> None:
        """Leave what is under way, and form a group of those that are left. Collective."""
        learner, world = self._learner, self._learner.world
        regroups = world.generation == self._generation
        self.give_up()
        if regroups:
            before = world.world_ranks
            try:
                world.reconfigure(allow_join=allow_join)
            finally:
                self._fruitless = self._fruitless + 1 if world.world_ranks == before else 0
        self._generation = world.generation
        learner.reconfigure()


def begin_with_remaining(comm: Any, begin: Callable[[], object]) -> None:
    """Begin something; again, where ranks have died in it, with those that are left. Collective."""
    if isinstance(comm, Communicator):
        comm.end_replay_log()
    fruitless = 0
    while True:
        try:
            begin()
            return
        except Exception as error:
            if not (is_rank_failure(error) and comm.fault_tolerant) or fruitless > MOST_FRUITLESS:
                raise
            before = comm.world_ranks
            reconfigure_ranks(comm)
            fruitless = fruitless + 1 if comm.world_ranks == before else 0
