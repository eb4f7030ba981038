"""Apply a session's policy for losses and gradients that are not finite."""

from __future__ import annotations

import math
from types import TracebackType

from ...compression import problem_with
from ...errors import DivergedError
from ..learner import Learner
from ..non_finite import require_can_skip
from ..recovery.snapshot import Snapshot
from .minibatches import SessionMinibatches
from .options import KEEP_EVERY, NotFinitePolicy
from .state import Progress, SessionState


class NonFiniteRunner:
    """Applies the policy around the session's loop, as a `with` block.

    Args:
        policy: the session's checked policy. None: the learner's own.
        learner: the session's learner.
        minibatches: the session's minibatches.

    Memory: "reduce" keeps two copies of all state.
    """

    def __init__(
        self,
        policy: NotFinitePolicy | str | None,
        learner: Learner,
        minibatches: SessionMinibatches,
    ) -> None:
        skipped = learner.skipped
        assert not isinstance(policy, str)
        given = "skip" if skipped.skips else "stop"
        self._policy = policy or NotFinitePolicy(not_finite=given, not_finite_most=skipped.most)
        self._learner, self._minibatches, self._skipped = learner, minibatches, skipped
        self._asked = policy is not None
        if self._policy.not_finite == "skip":
            require_can_skip(learner.algorithm)
        self.reduces = self._policy.reduces
        self._before = skipped.skips, skipped.most, skipped.option
        self._reported = skipped.minibatches
        self._snapshots: list[tuple[Snapshot, int, tuple[float, int]]] = []  # newest first
        self._failed_at, self._in_a_row, self._past_failure = -1, 0, True

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

    def loss_to_check(self, loss: float) -> float | None:
        """Return the loss for the step to check, or None if the step must not check it. Local."""
        return loss if self.reduces or self._skipped.skips else None

    def counts(self, loss: float) -> bool:
        """Return whether a loss counts in the row's mean. Local.

        Losses of skipped or undone steps do not count.
        """
        return not (self.reduces or self._skipped.skips) or math.isfinite(loss)

    def keep(self, state: SessionState, before: int | None = None) -> None:
        """With "reduce": take a snapshot if due.

        Args:
            before: samples before the latest step. None: take a snapshot in any case.
        Raises:
            DivergedError: on all ranks, if the state is not finite on any rank.

        Collective if a snapshot is due.
        """
        learner, minibatches = self._learner, self._minibatches
        if not self.reduces:
            return
        every = self._policy.not_finite_keep_every
        every = every or KEEP_EVERY * minibatches.size_after(learner.samples)
        if before is not None and not minibatches.crossed(before, every):
            return
        momenta = learner.local_step.state.buffers.values()
        problem = problem_with(learner.parameters.flat, name="model")
        for vector in momenta:
            problem = problem or problem_with(vector, name="optimizer's state")
        learner.group.agree(self._skipped.problem(problem), 0)
        snapshot = self._snapshots.pop()[0] if len(self._snapshots) == 2 else Snapshot()
        snapshot.take(learner)
        self._snapshots.insert(0, (snapshot, learner.samples, (state.loss, state.count)))
        self._past_failure = True

    def restore_good_state(self, error: DivergedError, state: SessionState) -> tuple[str, int]:
        """With "reduce": restore the newest good state, and lower the learning rate. Collective.

        Returns:
            A description of the change, and the samples of the restored state.
        Raises:
            DivergedError: too many failures in a row.
        """
        learner, policy = self._learner, self._policy
        now = learner.samples
        self._in_a_row = self._in_a_row + 1 if now <= self._failed_at else 1
        self._failed_at = max(now, self._failed_at)
        if self._in_a_row > policy.not_finite_most:
            raise DivergedError(
                f"numbers were not finite {self._in_a_row} times in a row, more than "
                f"not_finite_most={policy.not_finite_most}: reducing the learning rate did not "
                f"help: {error}"
            ) from error
        if not self._past_failure and len(self._snapshots) > 1:
            self._snapshots.pop(0)  # finite, but training fails again from there
        self._past_failure = False
        snapshot, samples, (state.loss, state.count) = self._snapshots[0]
        learner.runner.failed = False
        with learner.recovery.pause():  # until the session's own state is complete
            snapshot.restore(learner)
        state.factor *= policy.not_finite_factor
        factor = policy.not_finite_factor
        return f"learning rate times {factor:g}; restored the state of {samples} samples", samples

    def with_skips(self, row: Progress) -> Progress:
        """Add the minibatches skipped since the previous row to a row's event. Local."""
        skipped = self._skipped
        new, self._reported = skipped.minibatches - self._reported, skipped.minibatches
        if not new:
            return row
        return row.with_event(f"{new} minibatches skipped: {skipped.latest}")
