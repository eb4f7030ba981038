"""What a session does about a loss or a gradient that is not finite."""

from __future__ import annotations

import math
from types import TracebackType

from ...compression import problem_with
from ...errors import DivergedError
from ..learner import Learner
from ..non_finite import require_can_skip
from .minibatches import Feeding
from .non_finite_policy import KEEP_EVERY, NotFinitePolicy
from .snapshot import Snapshot
from .state import Progress, SessionState


class NonFiniteRunner:
    """A session's policy at work, around its loop: a `with` block.

    Args:
        policy: the session's, as it was checked; None: the learner's own.
        learner: the session's.
        feeding: its minibatches.

    Memory: "reduce" keeps two copies of all state.
    """

    def __init__(
        self, policy: NotFinitePolicy | str | None, learner: Learner, feeding: Feeding
    ) -> None:
        skipped = learner.skipped
        assert not isinstance(policy, str)
        given = "skip" if skipped.skips else "stop"
        self._policy = policy or NotFinitePolicy(not_finite=given, not_finite_most=skipped.most)
        self._learner, self._feeding, self._skipped = learner, feeding, skipped
        self._asked = policy is not None
        if self._policy.not_finite == "skip":
            require_can_skip(learner.algorithm)
        self.reduces = self._policy.not_finite == "reduce"
        self._before = skipped.skips, skipped.most, skipped.option
        self._told = skipped.minibatches
        self._good: list[tuple[Snapshot, int, tuple[float, int]]] = []  # the newest one first
        self._ranks: object = None  #: whose states these are
        self._failed_at, self._in_a_row, self._passed = -1, 0, True

    def __enter__(self) -> NonFiniteRunner:
        skipped, policy = self._skipped, self._policy
        skipped.skips, skipped.most = policy.not_finite == "skip", policy.not_finite_most
        if self._asked:
            skipped.option = "not_finite_most"
        skipped.keep(self._learner.samples)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        skipped = self._skipped
        skipped.skips, skipped.most, skipped.option = self._before

    def to_judge(self, loss: float) -> float | None:
        """What a step is to be told of a minibatch's loss. Local."""
        return loss if self.reduces or self._skipped.skips else None

    def counts(self, loss: float) -> bool:
        """Whether a loss counts among those of a row: one that is left out, or undone, does not.
        Local."""
        return not (self.reduces or self._skipped.skips) or math.isfinite(loss)

    def keep(self, standing: SessionState, before: int | None = None) -> None:
        """With "reduce": keep the state, where it is time to.

        Args:
            before: samples before the latest step; None: keep it in any case.
        Raises:
            DivergedError: on all ranks, if its numbers are not finite on any.

        Collective where it is time to.
        """
        learner, feeding = self._learner, self._feeding
        if not self.reduces:
            return
        every = self._policy.not_finite_keep_every
        every = every or KEEP_EVERY * feeding.size_after(learner.samples)
        same = self._ranks is learner.group
        if before is not None and same and not feeding.crossed(before, every):
            return
        momenta = learner.local_step.state.buffers.values()
        problem = problem_with(learner.parameters.flat, name="model")
        for vector in momenta:
            problem = problem or problem_with(vector, name="optimizer's state")
        learner.group.agree(self._skipped.problem(problem), 0)
        if self._ranks is not learner.group:  # some have died: those left have other parts of it
            self._ranks = learner.group
            self._good.clear()
        spare = self._good.pop()[0] if len(self._good) == 2 else Snapshot()
        spare.take(learner)
        self._good.insert(0, (spare, learner.samples, (standing.loss, standing.count)))
        self._passed = True

    def go_back(self, error: DivergedError, standing: SessionState) -> tuple[str, int]:
        """With "reduce": go on from the newest good state, at a lower rate; what was done, and the
        samples there. Collective.

        Raises:
            DivergedError: it was done too often in a row.
        """
        learner, policy = self._learner, self._policy
        if self._ranks is not learner.group or not self._good:
            raise error
        now = learner.samples
        self._in_a_row = self._in_a_row + 1 if now <= self._failed_at else 1
        self._failed_at = max(now, self._failed_at)
        if self._in_a_row > policy.not_finite_most:
            raise DivergedError(
                f"numbers were not finite {self._in_a_row} times in a row, and not_finite_most="
                f"{policy.not_finite_most}: the learning rate was reduced by as many, and did not "
                f"help: {error}"
            ) from error
        if not self._passed and len(self._good) > 1:
            self._good.pop(0)  # finite, but too far gone
        self._passed = False
        state, samples, (standing.loss, standing.count) = self._good[0]
        learner.runner.failed = False
        state.restore(learner)
        standing.factor *= policy.not_finite_factor
        did = f"learning rate times {policy.not_finite_factor:g}; back to the state of {samples} "
        return f"{did}samples", samples

    def noted(self, row: Progress) -> Progress:
        """A row that says what was left out since the one before. Local."""
        skipped = self._skipped
        new, self._told = skipped.minibatches - self._told, skipped.minibatches
        if not new:
            return row
        return row.with_event(f"{new} minibatches left out: {skipped.latest}")
