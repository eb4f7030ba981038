"""Recovery of a learner from rank failures; with `NoRecovery`, the default, a failure ends the job.

`Rollback` restores a snapshot on all ranks; with `ServerFailover` every worker continues from its
present state. Both retry by the loop in `communication.retry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from ...communication import Communicator, can_recover, reconfigure_ranks, retry
from ...errors import UserError
from ...state import StateReplaced
from ..background_tasks import BackgroundTasks
from ..state.stateful import Stateful

Result = TypeVar("Result")
Item = TypeVar("Item")


class Recoverable(Stateful, Protocol):
    """The interface of a `Learner` for recoveries; documented there."""

    stripe_sizes: Sequence[Mapping[str, int]]
    background_tasks: BackgroundTasks


class Recovery(ABC):
    """Continues training after rank failures, on the remaining ranks and the ranks that join.

    Attributes:
        ranks_may_change: True if ranks may fail or join; sources then issue the following samples
            again.
        rollbacks: so far.
        has_joined: True if this rank had no state before the latest recovery.
        in_session: True during a session; the session then decides when to count a step
            (`stepped`).
    """

    ranks_may_change = False
    rollbacks = 0
    has_joined = False
    in_session = False

    @property
    @abstractmethod
    def common_progress(self) -> int:
        """A count of work completed by all ranks together; equal on all ranks after a recovery.
        Local."""

    @abstractmethod
    def begin(self) -> None:
        """Start this recovery; a rank that joins receives the state of the remaining ranks.
        Collective."""

    @abstractmethod
    def run(self, function: Callable[[], Result]) -> Result:
        """Run a function that trains, and rerun the function after every rank failure.
        Collective."""

    def complete(self, function: Callable[[], Result]) -> Result:
        """Run a function that trains, like `run`, until all ranks have completed it together: no
        later failure leads back into it. Collective."""
        return self.run(function)

    @abstractmethod
    def collective(self, function: Callable[[], Result]) -> Result:
        """Run a function that takes no step, and rerun the function after failures without
        rollback.

        Raises:
            RanksLost: training has to roll back; an outer call retries.

        Collective over the ranks that train.
        """

    @abstractmethod
    def commit_after(self, function: Callable[[], Result]) -> Result | None:
        """Run a function that takes no step, until all ranks have completed it together, or
        training has rolled back to before: then return None. Collective."""

    def commit_once(self, function: Callable[[], object]) -> None:
        """Run a function without a result like `commit_after`, also in a session, which notices a
        rollback by itself. Collective."""
        self.attempt(function)

    @abstractmethod
    def attempt(self, call: Callable[[], object]) -> bool:
        """Make a collective call. Return False if training has rolled back instead."""

    @abstractmethod
    def step(self, take: Callable[[int], object], samples: int) -> bool:
        """Take a step of this rank's `samples`. Return False if its minibatch will be issued again.

        Collective.
        """

    @abstractmethod
    def finish(self, complete: Callable[[], object]) -> None:
        """Complete the model, repeatedly after failures, until all ranks hold it. Collective."""

    @abstractmethod
    def recover(self, *, allow_join: bool = True) -> None:
        """Continue on the remaining ranks, after a rank failure was raised. Collective.

        Args:
            allow_join: let standby ranks join.
        """

    @abstractmethod
    def close(self, close: Callable[[], object]) -> None:
        """Call a function that closes the learner. After a rank failure abandon all pending work
        instead. Collective."""

    @abstractmethod
    def repeatable(self, items: Iterable[Item]) -> Iterable[Item]:
        """Return the same items, readable again if a failure makes a function run again. Local."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Return what was lost so far, under "recovery", in a form that JSON can hold; empty
        without recovery. Local."""

    # Snapshots: without effect in recoveries without snapshots.

    def begin_session(self, session_state: Callable[[], Any]) -> Any:
        """Begin a session, or begin it again after a recovery. Local.

        Args:
            session_state: returns the session's state, of a type that can be sent to other ranks
                (`communication.serialization`): stored with each snapshot.
        Returns:
            The session state stored with the restored snapshot; None without a rollback.
        """
        self.in_session = True

    def end_session(self) -> bool:
        """End a completed session, so that no rollback leads into the session.

        Return False if ranks have failed, and the session has to continue. Collective.
        """
        self.leave_session()
        return True

    def leave_session(self) -> None:
        """Leave the session, complete or not. Local."""
        self.in_session = False

    def pause(self) -> AbstractContextManager[None]:
        """Suspend snapshots for a `with` block, such as for a trial. Local."""
        return nullcontext()

    def stepped(self) -> None:  # noqa: B027
        """Count a fully processed step, and take a snapshot if one is due. Local."""

    def commit(self) -> None:  # noqa: B027
        """Take a snapshot now, on all ranks after the same step. Local."""

    def state_replaced(self, event: StateReplaced) -> None:  # noqa: B027
        """Commit a state set by the program, so that no rollback leads to a state before.
        Collective."""

    def restore_part(self, name: str) -> None:  # noqa: B027
        """Restore one of the learner's states from the latest snapshot. Local."""

    def end_pass(self) -> bool:
        """Commit at the end of a source's pass, so that no rollback leads into the pass.

        Return False if ranks have failed, and training has rolled back into the pass. Collective.
        """
        return True


class NoRecovery(Recovery):
    """The default: every call is made once, and a rank failure ends the job."""

    common_progress = 0

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
        raise UserError("recover: the ranks must be fault-tolerant (parallel-sgd run --survive)")

    def close(self, close: Callable[[], object]) -> None:
        close()

    def repeatable(self, items: Iterable[Item]) -> Iterable[Item]:
        return items

    def report(self) -> dict[str, Any]:
        return {}


class Reconfiguring(Recovery):
    """Base of `Rollback` and `ServerFailover`: reconfigures a learner's ranks.

    Args:
        learner: on ranks of a fault-tolerant communicator.
        set_up: sets up the learner on the present ranks, like a new one except for its state.
            Collective.
    """

    ranks_may_change = True

    def __init__(self, learner: Recoverable, set_up: Callable[[], None]) -> None:
        self._learner, self._set_up = learner, set_up
        self._generation = learner.world.generation

    @abstractmethod
    def _continue(self, *, allow_join: bool) -> None:
        """Reconfigure once, and continue on the present ranks. Collective."""

    def recover(self, *, allow_join: bool = True) -> None:
        world = self._learner.world
        retry(world, lambda: None, lambda: self._continue(allow_join=allow_join), failed=True)

    def close(self, close: Callable[[], object]) -> None:
        try:
            close()
        except Exception as error:
            self._require_recoverable(error)
            self._give_up()

    def repeatable(self, items: Iterable[Item]) -> Iterable[Item]:
        return [*items] if isinstance(items, Iterator) else items

    def report(self) -> dict[str, Any]:
        world = self._learner.world
        ranks = {"ranks": list(world.world_ranks), "ranks_lost": list(world.failed_ranks)}
        return {"recovery": ranks | self._losses()}

    @abstractmethod
    def _losses(self) -> dict[str, int]:
        """Return counts of what was lost so far, by name. Local."""

    def _give_up(self) -> None:
        """Abandon all pending work, on all ranks. Local."""
        if self._learner.world.generation == self._generation:
            self._learner.world.revoke()
        # bounded: waits for work of this rank, whose own waits are bounded
        self._learner.background_tasks.wait()
        self._learner.runner.abandon()

    def _reconfigure(self, *, allow_join: bool) -> None:
        """Abandon pending work, and form a group of the present ranks. Collective."""
        world = self._learner.world
        is_first_to_notice = world.generation == self._generation
        self._give_up()
        if is_first_to_notice:
            world.reconfigure(allow_join=allow_join)
        self._generation = world.generation
        self._set_up()

    def _require_recoverable(self, error: Exception) -> None:
        """Raise the error again, unless the remaining ranks can continue. Local."""
        if not can_recover(self._learner.world, error):
            raise error


def begin_with_remaining(comm: Any, begin: Callable[[], object]) -> None:
    """Set up a learner, and after a failure again on the remaining ranks. Collective."""
    if not isinstance(comm, Communicator):  # `begin` refuses it
        begin()
        return
    comm.end_replay_log()
    retry(comm, begin, lambda: reconfigure_ranks(comm))
    comm.fruitless = 0
