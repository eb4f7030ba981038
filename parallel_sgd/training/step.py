"""A learner's training step: from this rank's gradient to the update of all ranks."""

from __future__ import annotations

from typing import Protocol

from ..errors import UserError
from ..validation import integer, one_number
from ..warning import warn
from . import non_finite
from .background_tasks import BackgroundTasks
from .consistency import SAME_GRADIENTS, STEP
from .minibatch_ledger import MOST_SAMPLES
from .model_access import ModelAccess
from .model_adapter import AdaptedLearner, ModelAdapter
from .shares import RankShares
from .step_timer import StepTimer


class SteppingLearner(AdaptedLearner, Protocol):
    """The interface of a `Learner` for its training step; documented there."""

    adapter: ModelAdapter
    access: ModelAccess
    background_tasks: BackgroundTasks
    timer: StepTimer
    shares: RankShares


class TrainingStep:
    """Takes the steps of a learner.

    The way of a step: `run` checks the loss and lets the recovery call `_attempt`; the model's
    adapter fills the gradient and calls `take`; the timer calls `_train`, which hands the
    minibatch to the algorithm.

    Args:
        learner: whose parts are used. A recovery may exchange these parts between two steps.
    """

    def __init__(self, learner: SteppingLearner) -> None:
        self._learner = learner

    def run(self, samples: int, loss: float | None) -> int:
        """Take a step: see `Learner.step`. Collective."""
        learner = self._learner
        if loss is not None:
            try:
                learner.skipped.check_loss(float(one_number("loss", loss)))
            except UserError as error:
                learner.fail(str(error))
        ledger = learner.ledger
        if not self._take_discarded(samples):
            before = ledger.steps
            if learner.recovery.step(self._attempt, samples):
                return ledger.trained
            if ledger.steps == before:  # the step failed before its minibatch was taken
                self._take_discarded(samples)
        learner.skipped.problem(None)
        learner.adapter.discard_minibatch()
        ledger.trained = 0
        return 0

    def _take_discarded(self, samples: int) -> bool:
        try:
            return self._learner.ledger.take_discarded(samples)
        except UserError as error:
            self._learner.fail(str(error))

    def _attempt(self, samples: int) -> None:
        self._learner.adapter.step(samples, self.take)

    def take(self, samples: int, *, skip: bool = False) -> int:
        """Take a step with the gradient in the learner's vector; with `skip`, on all ranks, only
        the clock advances. Return the samples of all ranks. Collective."""
        learner = self._learner
        if learner.background_tasks.work or learner.access.is_closed:
            learner.access.require_open()
            learner.background_tasks.check()
        if learner.access.is_shown:
            learner.access.require_own("step")
        trained = learner.timer.step(self._train, samples, skip)
        learner.shares.stepped()
        return trained

    def _train(self, samples: int, skip: bool) -> int:
        learner = self._learner
        if learner.serves:
            raise UserError(
                f"rank {learner.world.rank} is a server and takes no steps: call learner.finish() "
                "on this rank, which serves (sources give servers no minibatches)"
            )
        comm, ledger, consistency = learner.comm, learner.ledger, learner.consistency
        consistency.begin(STEP, comm)
        try:
            try:
                samples = integer("samples", samples, 0, MOST_SAMPLES)
                total = ledger.take(samples)
            except UserError as error:
                learner.fail(str(error))
            if samples == 0:  # remove the result of the last exchange
                learner.gradient.flat.fill(0)
            if skip:
                trained = learner.runner.skip(samples, total)
            elif learner.skipped.skips:
                trained = non_finite.train(learner.runner, samples, total)
            else:
                trained = learner.runner.train(samples, total)
            ledger.trained = trained
            if total is not None and trained > total:
                ledger.catch_up(trained - total)
        finally:
            comm.consistency = None
            ledger.end_step()
        if consistency.mark and consistency.same_gradients() and comm.rank == 0:
            try:
                warn(SAME_GRADIENTS)
            except UserError as error:
                learner.fail(str(error))
        return trained
