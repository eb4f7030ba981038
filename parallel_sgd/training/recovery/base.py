"""Recovery of a learner from the failure of ranks; `NoRecovery`, the default, lets the job end.

`Rollback` takes all ranks back to a snapshot; `ServerFailover` lets every worker continue where it
is. Both retry by one loop, `communication.retry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from ...communication import Communicator, can_recover, reconfigure_ranks, retry
from ...state import StateReplaced
from ..state.stateful import Stateful

Result = TypeVar("Result")


class Recoverable(Stateful, Protocol):
    """The part of a `Learner` that a recovery works on; documented there."""

    stripe_sizes: Sequence[Mapping[str, int]]

    def abandon(self) -> None: ...

    def reconfigure(self) -> None: ...


class Recovery(ABC):
    """Continues training on the remaining ranks, and those that join, after ranks have failed.

    Attributes:
        ranks_may_change: a failure changes the ranks, and sources deal out again what comes next.
        times: rollbacks so far.
        has_joined: this rank had no state when training continued last.
        in_session: a session decides after which steps a snapshot may be taken (`stepped`).
    """

    ranks_may_change = False
    times = 0
    has_joined = False
    in_session = False

    @abstractmethod
    def begin(self) -> None:
        """Take part from here on; a rank that joins gets the state of the others. Collective."""

    @abstractmethod
    def run(self, function: Callable[[], Result]) -> Result:
        """Call a function that trains; again after each failure of ranks. Collective."""

    @abstractmethod
    def collective(self, function: Callable[[], Result]) -> Result:
        """Call a function that takes no step; again after failures, if no rank rolls back.

        Raises:
            RanksLost: training has to roll back; the caller's caller retries.

        Collective over the ranks that train.
        """

    @abstractmethod
    def commit_after(self, function: Callable[[], Result]) -> Result:
        """Call a function that takes no step until all ranks have passed it together.

        Collective. Training may have rolled back between two calls.
        """

    @abstractmethod
    def attempt(self, call: Callable[[], object]) -> bool:
        """Make a collective call. Return False if training has rolled back instead."""

    @abstractmethod
    def step(self, take: Callable[[int], object], samples: int) -> bool:
        """Take a step of this rank's `samples`. Return False if its minibatch is dealt out again.

        Collective.
        """

    @abstractmethod
    def finish(self, complete: Callable[[], object]) -> None:
        """Complete the model, again after failures, until all ranks hold it. Collective."""

    @abstractmethod
    def recover(self, *, allow_join: bool = True) -> None:
        """Continue with the remaining ranks, after a failure of ranks was raised. Collective.

        Args:
            allow_join: standby ranks may join.
        """

    @abstractmethod
    def give_up(self) -> None:
        """Abandon all that is under way, on all ranks. Local."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Return what was lost so far, for JSON. Local."""

    # Snapshots: of no effect for recoveries that take none.

    def begin_session(self, companion: Callable[[], Any]) -> Any:
        """A session begins, or begins again after a recovery. Local.

        Args:
            companion: gives the session's own state, for JSON: kept with each snapshot.
        Returns:
            The state that was kept with the snapshot to which training rolled back; else None.
        """
        self.in_session = True

    def end_session(self) -> bool:
        """The session has come to its end: see that no rank rolls back into it any more.

        Returns False if ranks have failed, and the session has to continue. Collective.
        """
        self.leave_session()
        return self.end_pass()

    def leave_session(self) -> None:
        """No session trains any more, also because of an error. Local."""
        self.in_session = False

    def pause(self) -> AbstractContextManager[None]:
        """Take no snapshots within a `with` block: of what is only tried. Local."""
        return nullcontext()

    def stepped(self) -> None:  # noqa: B027
        """A step, and all that follows from it, is done: take a snapshot, if one is due. Local."""

    def commit(self) -> None:  # noqa: B027
        """Take a snapshot now, on all ranks after the same step. Local."""

    def state_replaced(self, event: StateReplaced) -> None:  # noqa: B027
        """The program has replaced the state: no rank may roll back to before. Collective."""

    def restore_part(self, name: str) -> None:  # noqa: B027
        """Restore one of the learner's states from the latest snapshot. Local."""

    def end_pass(self) -> bool:
        """A source has given all that it has: see that no rank rolls back into the pass any more.

        Returns False if ranks have failed, and training has rolled back into it. Collective.
        """
        return True


class NoRecovery(Recovery):
    """The default: a failed rank ends the job, so calls are made once, as they are."""

    def begin(self) -> None:
        pass

    def run(self, function: Callable[[], Result]) -> Result:
        return function()

    def collective(self, function: Callable[[], Result]) -> Result:
        return function()

    def commit_after(self, function: Callable[[], Result]) -> Result:
        return function()

    def attempt(self, call: Callable[[], object]) -> bool:
        call()
        return True

    def step(self, take: Callable[[int], object], samples: int) -> bool:
        take(samples)
        return True

    def finish(self, complete: Callable[[], object]) -> None:
        complete()

    def recover(self, *, allow_join: bool = True) -> None:
        raise NotImplementedError("only ranks of `parallel-sgd run --survive` recover")

    def give_up(self) -> None:
        raise NotImplementedError("only ranks of `parallel-sgd run --survive` recover")

    def report(self) -> dict[str, Any]:
        return {}


class Reconfiguring(Recovery):
    """Reconfigures the ranks of a learner: common to `Rollback` and `ServerFailover`.

    Args:
        learner: on ranks of a fault-tolerant communicator.
    """

    ranks_may_change = True

    def __init__(self, learner: Recoverable) -> None:
        self._learner, self._generation = learner, learner.world.generation

    @abstractmethod
    def _continue(self, *, allow_join: bool) -> None:
        """Reconfigure once, and continue with the present ranks. Collective."""

    def recover(self, *, allow_join: bool = True) -> None:
        world = self._learner.world
        retry(world, lambda: None, lambda: self._continue(allow_join=allow_join), failed=True)

    def give_up(self) -> None:
        if self._learner.world.generation == self._generation:
            self._learner.world.revoke()
        self._learner.abandon()

    def _reconfigure(self, *, allow_join: bool) -> None:
        """Abandon what is under way, and form a group of the remaining ranks. Collective."""
        learner, world = self._learner, self._learner.world
        is_first_to_notice = world.generation == self._generation
        self.give_up()
        if is_first_to_notice:
            world.reconfigure(allow_join=allow_join)
        self._generation = world.generation
        learner.reconfigure()

    def _require_recoverable(self, error: Exception) -> None:
        """Raise the error again, unless the remaining ranks can continue. Local."""
        if not can_recover(self._learner.world, error):
            raise error


def begin_with_remaining(comm: Any, begin: Callable[[], object]) -> None:
    """Set up a learner; again, after a failure, with the remaining ranks. Collective."""
    if not isinstance(comm, Communicator):  # it is refused
        begin()
        return
    comm.end_replay_log()
    retry(comm, begin, lambda: reconfigure_ranks(comm))
    comm.fruitless = 0
