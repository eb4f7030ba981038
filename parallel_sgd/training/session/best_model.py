"""Keep the best model of a session, and decide by the latest criterion how training continues."""

from __future__ import annotations

import math
from collections.abc import Callable

from ...errors import SharedPeerFailure
from ..learner import Learner
from ..recovery.snapshot import Snapshot
from .options import SessionOptions
from .state import Progress, SessionState


class BestModel:
    """Keeps the best model, adjusts the learning rate, and decides when training ends early.

    Args:
        session: the checked options.
        learner: the session's learner.
        best: the snapshot for the best model.

    Attributes:
        ended: the reason why training ends early, or None.
        ends_with_best: whether the final model is the best model.
    """

    def __init__(self, session: SessionOptions, learner: Learner, best: Snapshot) -> None:
        self._rate, self._validation = session.auto_learning_rate, session.validation
        self._learner, self._best = learner, best
        validation = session.validation
        self.ends_with_best = validation is not None and validation.restore_best
        self.ended: str | None = None

    @property
    def keeps_best(self) -> bool:
        """Return whether the best model is kept in memory. Local."""
        return self.ends_with_best or (self._rate is not None and self._rate.load_best_model)

    @property
    def can_roll_back(self) -> bool:
        """Return whether the best model can replace a model that is not finite. Local."""
        rate = self._rate
        return rate is not None and rate.load_best_model and self._best.can_restore(self._learner)

    def keep(self) -> None:
        """Keep the present model as the best. Local; collective with parameter servers."""
        self._learner.recovery.collective(lambda: self._best.take(self._learner))

    def _restore_best(self) -> bool:
        """Restore the best model, if these ranks can. Return whether they have. Collective.

        Raises:
            SharedPeerFailure: a rank has failed meanwhile, and some workers and servers have
                restored their parts already.
        """
        has_begun = False

        def restore() -> bool:
            nonlocal has_begun
            if any(self._learner.comm.allgather_object(has_begun)):
                raise SharedPeerFailure(
                    "a rank has failed while the best model was restored on workers and servers: "
                    "restart from a checkpoint (parallel-sgd run --restarts)"
                )
            has_begun = self._best.can_restore(self._learner)
            if has_begun:
                self._best.restore(self._learner)
            return has_begun

        return self._learner.recovery.collective(restore)

    def share_best(self, state: SessionState, save: Callable[[], object]) -> None:
        """Give the best model to all ranks, after ranks have failed or joined. Collective.

        If no rank has the best model, the session's best criterion is forgotten.

        Args:
            save: called on all ranks while they have the best model.
        """
        if not self.keeps_best:
            return
        best, samples = self._best, state.best_samples
        if state.best is None or best.samples != samples:  # of a row undone by the rollback
            best.discard()
        if not any(self._learner.comm.allgather_object(best.taken)):
            state.best = None
            return
        present = Snapshot()
        with self._learner.recovery.pause():  # no rank may roll back to the best model
            present.take(self._learner)
            best.restore(self._learner)
            self.keep()
            save()
            present.restore(self._learner)

    def finish(self) -> bool:
        """Restore the best model at the end of training, if requested.

        Returns:
            Whether the best model was restored.

        Collective.
        """
        if not self.ends_with_best:
            return False
        before, self.ended = self.ended, self.ended or "ended with the best model"
        restored = self._restore_best()  # if a rank fails from now on, training must not resume
        if not restored:
            self.ended = before
        return restored

    def adjust(
        self, row: Progress, criterion: float, state: SessionState, *, last: bool
    ) -> tuple[Progress, bool]:
        """Update the learning rate and the best model by the criterion of a row.

        Args:
            row: the latest row.
            criterion: the row's criterion; lower is better.
            state: the session's state. Changed.
            last: whether training is at its end.
        Returns:
            The row with a description of the changes, and whether the best model was restored.

        Collective if the best model is kept or restored.
        """
        self._note_best(criterion, state)
        rate = self._rate
        if rate is None:
            return row, False
        state.looks += 1
        if state.looks < rate.learn_rate_adjust_interval and math.isfinite(criterion):
            return row, False
        state.looks = 0
        verdict = rate.judge(state.latest, criterion)
        state.factor *= verdict.factor
        if verdict.factor != 1:
            row = row.with_event(f"learning rate times {verdict.factor:g}")
        base_rate = self._learner.local_step.lr
        assert base_rate is not None  # the session refuses optimizers without a rate
        if base_rate * state.factor < rate.min_learn_rate:
            self.ended = f"ended: the learning rate has fallen below {rate.min_learn_rate:g}"
        if not verdict.roll_back:
            state.latest = criterion
            return row, False
        if last or self.ended:
            self.ends_with_best = True
            return row, False
        with self._learner.recovery.pause():  # until the session's own state is complete
            restored = self._restore_best()
        if not restored:
            state.latest = criterion
            event = "best model not restored: a rank with a part of it has failed"
            return row.with_event(event), False
        state.latest = state.best
        return row.with_event(f"restored the model of {state.best_samples} samples"), True

    def _note_best(self, criterion: float, state: SessionState) -> None:
        """Keep the model if it is the best so far. End training if `patience` has run out."""
        validation = self._validation
        least = validation.min_improvement if validation else 0.0
        best = state.best is None or criterion < state.best - least
        if best and math.isfinite(criterion):
            state.best, state.best_samples = criterion, self._learner.samples
            state.stale = 0
            if self.keeps_best:
                self.keep()
            return
        state.stale += 1
        patience = validation.patience if validation else None
        if patience is not None and state.stale >= patience:
            self.ended = f"ended: no better model in {patience} cross-validations"
