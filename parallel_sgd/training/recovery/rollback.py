"""Rollback: after rank failures, all ranks restore a common snapshot.

Every rank takes snapshots in memory, after the same steps. After a failure the remaining ranks
agree on the newest snapshot held by all of them, and restore that one. State that depends on the
number of ranks is made anew, and the rest is redistributed by the reshard rules of
`parallel_sgd.state`: each rank keeps its own part of a sum, and stripes are cut anew. The failed
ranks' parts of sums and stripes are lost. The clock rolls back with the state, so sources issue the
later samples again.

A rank that joins has no state: it receives the state of the remaining ranks, with zeros for a
failed rank's parts of sums.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ...communication import retry
from ...communication.stderr import write_stderr
from ...errors import RanksChanged, RanksLost
from ...state import Cause, StateReplaced
from ..state.reshard import stripe_sizes
from ..state.state_tree import restore_state, unflatten
from .base import Reconfiguring, Recoverable
from .snapshot import SharedSnapshot, Snapshot

Result = TypeVar("Result")

COMMIT_EVERY = 10  #: steps


@dataclass
class Losses:
    """Work lost so far, for `Learner.report`.

    Attributes:
        samples: of all ranks, trained on again.
        values: residual values held by failed ranks.
    """

    samples: int = 0
    values: int = 0


class Rollback(Reconfiguring):
    """Keeps two snapshots of a learner, and restores one after a rank failure.

    Args:
        learner, set_up: see `Reconfiguring`.
        commit_every: steps between two snapshots, if the algorithm allows.

    Attributes:
        losses: so far.

    Memory: two copies of the state. Cost: a pass over the state for each snapshot.
    """

    def __init__(self, learner: Recoverable, set_up: Callable[[], None], commit_every: int) -> None:
        super().__init__(learner, set_up)
        self._every = commit_every
        self._snapshots = (Snapshot(), Snapshot())
        self._taken = 0  # snapshots so far, equal on all ranks
        self._place = 0  # of the latest snapshot: see `Snapshot`
        self._steps = 0  # since the latest snapshot
        self._trained = 0  # samples at the latest failure, with those trained on again
        self._restored = sys.maxsize  # earliest place restored during a commit
        self._paused = self._completes = False
        self._may_invite = True  # standby ranks, with a recovery of its own
        self._is_final = False  # the restored snapshot is the final model
        self._read_session_state: Callable[[], Any] = lambda: None
        self._session_state: Any = None  # of the restored snapshot
        self.losses = Losses()

    def begin(self) -> None:
        if self._generation:  # ranks have been reconfigured, and may have trained
            self._rejoin()
        else:
            self._begin_snapshots()

    @property
    def common_progress(self) -> int:
        return self._learner.samples

    # Verbs.

    def run(self, function: Callable[[], Result]) -> Result:
        return retry(self._learner.world, function, self.recover)

    def complete(self, function: Callable[[], Result]) -> Result:
        """See `Recovery`. A nested call, or one in a session, is completed by the outer one."""
        if self._completes or self.in_session:
            return self.run(function)
        self._completes = True
        try:
            while True:
                committed = self._try_commit(lambda: self.run(function))
                if committed is not None:
                    return committed[0]
        finally:
            self._completes = False

    def collective(self, function: Callable[[], Result]) -> Result:
        """Run the function once: after a failure training rolls back, and the caller must know."""
        return function()

    def attempt(self, call: Callable[[], object]) -> bool:
        world = self._learner.world
        try:
            if world.generation != self._generation or (world.spares and self._may_invite):
                raise RanksLost("the ranks have changed or can change")
            call()
        except Exception as error:
            self._require_recoverable(error)
            self.recover()
            return False
        return True

    def step(self, take: Callable[[int], object], samples: int) -> bool:
        def taken() -> None:
            take(samples)
            if not self.in_session:
                self.stepped()

        return self.attempt(taken)

    def commit_after(self, function: Callable[[], Result]) -> Result | None:
        committed = self._commit_here(function)
        return committed[0] if committed else None

    def commit_once(self, function: Callable[[], object]) -> None:
        """See `Recovery`. In a session a failure ends the save, and the session begins again."""
        self.attempt(function) if self.in_session else self._commit_here(function)

    def end_pass(self) -> bool:
        rollbacks = self.rollbacks
        committed = self._try_commit(lambda: None)
        self._rerun_after(rollbacks)
        return committed is not None

    def finish(self, complete: Callable[[], object]) -> None:
        def completed() -> None:
            if not self._is_final:
                complete()

        while self._try_commit(completed, final=True) is None:
            pass

    def _commit_here(self, function: Callable[[], Result]) -> tuple[Result] | None:
        """Run a function, then commit, repeatedly after failures. Return None if training has
        rolled back to before: some ranks may not have taken the latest step, and get here again.
        """
        while True:
            here, rollbacks = self._taken if self._steps else self._place, self.rollbacks
            self._restored = sys.maxsize
            committed = self._try_commit(function)
            if self._restored < here or committed is not None:
                self._rerun_after(rollbacks)
                return None if self._restored < here else committed

    def _rerun_after(self, rollbacks: int) -> None:
        """Rerun the function of `complete` if training has rolled back meanwhile: ranks past the
        commit, which have failed in later work of the function, rerun it."""
        if self._completes and self.rollbacks > rollbacks:
            raise RanksChanged

    def _try_commit(
        self, function: Callable[[], Result], *, final: bool = False
    ) -> tuple[Result] | None:
        """Run a function, then commit: a two-phase commit. Collective.

        Phase 1: every rank takes a snapshot. Phase 2: the ranks meet; a rank past this point knows
        that all ranks hold the snapshot. A failure before phase 2 rolls back, and None is returned.
        A failure within phase 2 may be visible to some ranks only: these roll back to the newest
        common snapshot, and if that is the new one, the commit stands.

        All ranks meet between two commits: otherwise the ranks might have no snapshot in common. In
        a session a failure is raised, and all ranks begin the session again.
        """
        number, within = None, sys.maxsize
        try:
            result = function()
            algorithm = self._learner.runner.algorithm
            has_met = self._steps > 0 and algorithm.synchronizes_every_step  # since the last commit
            if not (has_met or self._paused):
                self._learner.meet()
            within, self._restored = self._restored, sys.maxsize  # rollbacks within the function
            self._commit(final)
            number = None if self._paused else self._taken - 1
            self._learner.meet()
            return (result,)
        except Exception as error:
            self._require_recoverable(error)
            if self.in_session:
                raise
            self.recover(allow_join=False)  # a rank that joins would not reach this point
            stands = number is not None and self._restored >= number
            return (result,) if stands else None
        finally:
            self._restored = min(self._restored, within)

    # Snapshots.

    def begin_session(self, session_state: Callable[[], Any]) -> Any:
        super().begin_session(session_state)
        self._read_session_state = session_state
        return self._session_state

    def end_session(self) -> bool:
        self.leave_session()
        return self._try_commit(lambda: None) is not None

    def leave_session(self) -> None:
        super().leave_session()
        self._read_session_state, self._session_state = (lambda: None), None

    @contextmanager
    def pause(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def stepped(self) -> None:
        self._steps, self._is_final = self._steps + 1, False
        work = self._learner.runner
        if self._steps >= self._every and work.algorithm.replicated(work.state, work.work):
            self.commit()
            self._learner.world.fruitless = 0

    def commit(self) -> None:
        self._commit(False)

    def _commit(self, final: bool) -> None:
        self._may_invite = True
        if not self._paused:
            self._take_snapshot(final, self._read_session_state())

    def state_replaced(self, event: StateReplaced) -> None:
        if event.ranks_changed:
            return
        self._is_final, self._trained = False, 0
        if self._paused:
            return
        if self._steps == 0:
            self._learner.world.barrier()  # see `_try_commit`
        self.commit()

    def restore_part(self, name: str) -> None:
        newest = max(self._snapshots, key=lambda snapshot: snapshot.number)
        restore_state(self._learner, name, unflatten(newest.tree[name], newest.arrays))

    def _begin_snapshots(self) -> None:
        self._learner.stripe_sizes = self._learner.comm.allgather_object(
            stripe_sizes(self._learner)
        )
        self.commit()

    def _take_snapshot(self, final: bool, session_state: Any, place: int | None = None) -> None:
        oldest = min(self._snapshots, key=lambda snapshot: snapshot.number)
        oldest.number = -1  # until the snapshot is complete
        oldest.take(self._learner)
        self._place = oldest.place = self._taken if place is None else place
        oldest.final, oldest.session_state, oldest.lost = final, session_state, self.losses.values
        oldest.number, self._taken, self._steps = self._taken, self._taken + 1, 0

    # Recovery.

    def _continue(self, *, allow_join: bool) -> None:
        self._reconfigure(allow_join=allow_join)
        # A rank that has let none join may still be in this recovery: it must come to its end.
        self._may_invite = False
        self._rejoin()

    def _rejoin(self) -> None:
        """Agree on a snapshot, and restore this rank's state from it. Collective."""
        learner, comm = self._learner, self._learner.comm
        held = {s.number: s for s in self._snapshots if s.number >= 0}
        own_places = [(number, snapshot.place) for number, snapshot in sorted(held.items())]
        self._trained = max(self._trained, self.losses.samples + learner.samples)
        losses = self.losses.samples, self.losses.values
        all_ranks = comm.allgather_object((own_places, self._trained, losses))
        known = [dict(places) for places, _, _ in all_ranks if places]
        if not known:  # no rank holds a snapshot yet
            self._begin_snapshots()
            return
        common = set(known[0]).intersection(*known)
        number = max(common) if common else min(max(numbers) for numbers in known)
        place = next(places[number] for places in known if number in places)
        own = held.get(number)
        learner.stripe_sizes = comm.allgather_object(stripe_sizes(learner))
        shared = SharedSnapshot(learner, own)
        shared.restore(learner)
        learner.state_replaced(Cause.RECOVERED)
        # A recovery that fails before this point has restored nothing: the next one chooses anew.
        self._restored = min(self._restored, place)
        self.rollbacks += 1
        for snapshot in self._snapshots:
            snapshot.number = snapshot.number if snapshot is own else -1
        before = Losses(*max(losses for _, _, losses in all_ranks))  # a rank that joins has none
        self._trained = max(trained for places, trained, _ in all_ranks if places)
        again = max(before.samples, self._trained - shared.samples)
        self.losses = Losses(again, shared.values_lost)
        self._session_state, self.has_joined = shared.session_state, own is None
        self._is_final = shared.final
        self._taken = 1 + max(max(numbers) for numbers in known)  # some may still hold that one
        self._take_snapshot(shared.final, self._session_state, place)
        values = self.losses.values - before.values
        self._print(again - before.samples, max(0, values))

    def _losses(self) -> dict[str, int]:
        return {
            "samples_trained_again": self.losses.samples,
            "residual_values_lost": self.losses.values,
        }

    def _print(self, again: int, values: int) -> None:
        world = self._learner.world
        if world.rank == 0:
            failed = ", ".join(map(str, world.failed_ranks)) or "none"
            residuals = f"; {values} residual values are lost" if values else ""
            write_stderr(
                f"parallel_sgd: failed ranks: {failed}; {world.size} ranks continue from "
                f"{self._learner.samples} samples, and repeat {again} samples{residuals}"
            )
