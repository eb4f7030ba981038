"""Run a session: the loop over minibatches, and the tasks between two minibatches."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from ... import runtime
from ...communication import RanksChanged
from ...communication.liveness.preemption import preempt_on
from ...data.sources.minibatches import size_after, size_summary
from ...errors import SMALLER_RATE, DivergedError, Preempted, SharedError, UserError
from ...validation import one_number
from ..learner import Learner
from ..recovery.snapshot import Snapshot
from .batches import Batch, pieces_of
from .best_model import BestModel
from .checkpointing import SessionCheckpoints
from .evaluation import Evaluation
from .minibatches import SessionMinibatches
from .non_finite import NonFiniteRunner
from .options import SessionOptions
from .preemption import Preemption
from .run_output import CallOnce, RunOutput, run_callback
from .state import Progress, RunState, SessionState
from .tracking_services import PREEMPTED

BY_CALLBACK = "ended by a callback"


class TrainingRun:
    """Runs a session on a rank that trains.

    Args:
        session: the checked options.
        learner: the session's learner.
        best: the snapshot for the best model.
        preemption: the session's preemption on this rank.
        before: the run that a failure of ranks has ended. Comparisons of its ranks are not made
            again, unless ranks have joined.

    Creation is collective.
    """

    def __init__(
        self,
        session: SessionOptions,
        learner: Learner,
        best: Snapshot,
        preemption: Preemption,
        before: TrainingRun | None = None,
    ) -> None:
        self.session, self.learner, self.comm = session, learner, learner.comm
        kept: RunState | None = learner.recovery.begin_session(self._recovery_state)
        self.state = SessionState()
        self._start = learner.samples if kept is None else kept.start
        self._facts: dict[str, Any] | None = None  # the same on all ranks, once they have agreed
        self.minibatches: SessionMinibatches
        generation = learner.agreed.generation
        agreed = before is not None and kept is not None and kept.generation == generation
        # Some ranks may have failed in agreements that others have completed.
        if all(self.comm.allgather_object(agreed)):
            assert before is not None
            self.minibatches, self._facts = before.minibatches, before._facts
            self.minibatches.tuned_size = lambda: self.state.size
        else:
            self.minibatches = self.comm.together(
                lambda: SessionMinibatches(session, learner, lambda: self.state.size, self._start)
            )
        self.evaluation = self.comm.together(lambda: Evaluation(session, learner, self.minibatches))
        self.best_model = BestModel(session, learner, best)
        self.not_finite = self.comm.together(
            lambda: NonFiniteRunner(session.not_finite, learner, self.minibatches)
        )
        self.preemption = preemption
        preemption.begin()
        self.checkpoints: SessionCheckpoints | None = None
        self.output = RunOutput(session, learner, self.evaluation)
        self._search_from = Snapshot()
        self._criterion: float | None = None  #: of the present model
        self._begun = False
        self._generation = self.comm.generation
        if kept is not None:  # ranks have failed during the run
            self._continue_from(kept)

    def begin(self) -> TrainingRun:
        """Do all work before the first minibatch, and return the run itself. Collective."""
        if self._facts is None:
            self._facts = self._agree()
        self.output.lock_folder()
        if self.session.checkpoints:
            self.checkpoints = SessionCheckpoints(
                self.session, self.learner, self.minibatches, self._facts
            )
        try:
            self._begin()
        except BaseException as error:
            self.output.fail(error)
            self.output.close()
            raise
        return self

    def run(self) -> list[Progress]:
        """Train to the end, and return the rows. Collective.

        Raises:
            RanksChanged: ranks have failed or joined, and the learner continues with the present
                ranks. This run's knowledge of its ranks is out of date: a new run must take over.
        """
        try:
            with self.checkpoints or nullcontext(), self.not_finite:
                self.not_finite.keep(self.state)
                while self._continues():
                    self._train()
                self.preemption.leave_if_agreed(self._save_before_leaving)
                self._end()
                self.preemption.notify_servers()
        except RanksChanged:
            raise
        except Preempted:
            self.output.leave()
            raise
        except BaseException as error:
            self.output.fail(error)
            raise
        finally:
            self.learner.local_step.state.lr_factor = 1.0  # the factor belongs to this session
            self.output.close()
        return self.state.history if self.evaluation.has_rows else []

    # Recovery from rank failures, and joining ranks.

    def _recovery_state(self) -> RunState:
        """Return the run's state for recovery, rolled back together with the learner. Local."""
        return RunState(
            state=self.state.copy(),
            criterion=self._criterion,
            ended=self.best_model.ended,
            ends_with_best=self.best_model.ends_with_best,
            trained=self.output.trained,
            begun=self._begun,
            start=self._start,
            generation=self.learner.agreed.generation,
            rank=self._own_rank,
        )

    @property
    def _own_rank(self) -> int:
        return self.comm.world_ranks[self.comm.rank]

    def _continue_from(self, kept: RunState) -> None:
        """Restore the run's state after a rollback. Local.

        Args:
            kept: the result of `_recovery_state`, from this rank or another.
        """
        self.state, self._criterion = kept.state.copy(), kept.criterion
        if kept.rank != self._own_rank:
            self.state.begin_row()  # the sum is that of another rank
        self.best_model.ended = kept.ended
        self.best_model.ends_with_best = kept.ends_with_best
        self.output.trained, self._begun = kept.trained, kept.begun

    def _snapshot_if_due(self, *, new_row: bool) -> None:
        """Inform recovery of a completed step: recovery takes a snapshot if due. Local."""
        recovery = self.learner.recovery
        recovery.commit() if new_row else recovery.stepped()

    def _require_same_ranks(self) -> None:
        if self.comm.generation != self._generation:
            raise RanksChanged

    # Begin and end.

    def _agree(self) -> dict[str, Any]:
        """Check that all ranks have equal options and data. Collective.

        Returns:
            What must be the same when the run is resumed, by name.
        """
        session, checkpoints = self.session, self.session.checkpoints
        self.comm.require_agreement(
            {
                "minibatch_size": size_summary(self.minibatches.sizes),
                "epochs": session.epochs,
                "seed": session.seed,
                "rate_follows": session.rate_follows,
                "auto_minibatch_size": session.auto_minibatch_size,
                "auto_learning_rate": session.auto_learning_rate,
                "not_finite": session.not_finite,
                "progress_every": session.progress_every,
                "number of callbacks": len(session.callbacks),
                "validation": session.validation and session.validation.facts,
                "test": session.test is not None,
                "checkpoints": checkpoints and checkpoints.facts,
                "folder": session.folder is not None,
                "tracker": session.tracker and repr(session.tracker),
                "preempt_on": [number.name for number in preempt_on()],
            }
        )
        self.minibatches.meet()
        facts: dict[str, Any] = self.minibatches.facts | self.evaluation.meet()
        return facts

    def _begin(self) -> None:
        """Resume from a checkpoint, and start to write, once all checks have passed. Collective."""
        session, checkpoints, resumed = self.session, self.checkpoints, None
        restarted = self._begun
        if restarted:
            self.best_model.share_best(self.state, self._save_missing_best)
        elif checkpoints:
            self.state, resumed = checkpoints.resume_from(self.best_model)
        rows, ended = self.state.history, self.best_model.ended is not None
        if ended or self.learner.samples >= self.minibatches.total:  # the last row is rewritten
            rows = rows[:-1]

        def begun() -> None:
            if checkpoints:
                checkpoints.set_aside_newer(resumed)
            if session.started and not restarted:
                run_callback(session.started, self.learner)

        self.output.begin(rows, self.minibatches.total, begun)
        self._begun = True
        if resumed:  # the snapshot taken by loading knows nothing of this run
            self._snapshot_if_due(new_row=True)
        if self.learner.algorithm.asynchronous:  # else the first ready worker would be far ahead
            self.learner.meet()

    def _end(self) -> None:
        """Complete the model, and write it. Collective."""
        output, history = self.output, self.state.history
        best_model, state = self.best_model, self.state
        self._require_same_ranks()
        restored = best_model.finish()
        if restored:
            self._criterion = state.best
        if best_model.ended is not None and best_model.ended != BY_CALLBACK:
            state.ended, state.total = best_model.ended, self.minibatches.total
        self._save_at_end(needed=output.trained)
        samples = self.learner.samples
        self.learner.finish()  # may change the model: the last row is of the final model
        output.finished = True
        final = self.evaluation.final()
        if not history or (not self.evaluation.collective and history[-1].samples < samples):
            # The rank with the rows has failed, or is about to.
            history.append(self.evaluation.row(state, validates=False))
        row = replace(history[-1], **final).finite()
        event = f"restored the model of {state.best_samples} samples"
        is_earlier = restored and state.best_samples < row.samples
        history[-1] = row.with_event(event) if is_earlier else row
        output.complete(history)

    def _save_before_leaving(self) -> None:
        """Save all state, to resume later. Collective."""
        self._save_at_end(needed=True)
        self.output.finish_tracking(PREEMPTED)

    # The loop.

    def _continues(self) -> bool:
        ended = self.best_model.ended is not None or self.preemption.agreed
        return self.learner.samples < self.minibatches.total and not ended

    def _train(self) -> None:
        """Train until the end, or until the place in the data has changed."""
        for batch in self.minibatches:
            before, rows = self.learner.samples, len(self.state.history)
            try:
                if not self._step(batch):
                    continue
                self.not_finite.keep(self.state, before)
                moved = self._after_step(before)
            except DivergedError as error:
                if self.not_finite.reduces:
                    self._reduce(error)
                elif self.best_model.can_roll_back:
                    self._roll_back(str(error))
                else:
                    raise
                self._snapshot_if_due(new_row=True)
                return
            self._snapshot_if_due(new_row=len(self.state.history) > rows)
            if moved or self.preemption.stepped():
                return

    def _step(self, batch: Batch) -> int:
        """Train on a minibatch, and count its samples.

        Returns:
            The samples of all ranks, or 0 if the minibatch is to be distributed again.
        """
        learner, state, session = self.learner, self.state, self.session
        begin = runtime.perf_counter()
        adjusts = session.auto_learning_rate is not None or self.not_finite.reduces
        if adjusts or session.rate_follows is not None:
            factor = state.factor * self.minibatches.rate_factor(learner.samples)
            learner.local_step.state.lr_factor = factor
        samples, loss = self._gradient(batch)
        counts, counted = self.not_finite.counts(loss), (state.loss, state.count)
        # In a warm start all ranks have the same samples.
        if counts and (learner.distributed or self.comm.rank == 0):
            state.loss += loss
            state.count += samples
        total = learner.step(samples, self.not_finite.loss_to_check(loss))
        self._require_same_ranks()
        if not total:
            state.loss, state.count = counted
            return 0
        self.output.trained, self._criterion = True, None
        state.seconds += runtime.perf_counter() - begin
        self.output.show(learner.samples)
        return total

    def _gradient(self, batch: Batch) -> tuple[int, Any]:
        """Compute the gradient of a minibatch.

        Returns:
            This rank's samples, and their loss.
        Raises:
            SharedError: on all ranks, if the minibatch or its loss is bad on any rank.
        """
        try:
            samples = self.minibatches.samples_of(batch)
            pieces = pieces_of(batch, self.session.microbatch_size, samples)
            loss = one_number("loss", self.session.objective.backward(self.learner, pieces))
        except SharedError:
            raise
        except UserError as error:
            self.learner.fail(str(error))
        return samples, loss

    def _after_step(self, before: int) -> bool:
        """Do the tasks due after a step.

        Args:
            before: samples before the step.
        Returns:
            Whether the place in the data has changed, or training ends.
        """
        session, crossed = self.session, self.minibatches.crossed
        validation, checkpoints = session.validation, self.checkpoints
        validates = validation is not None and crossed(before, validation.every)
        if validates or crossed(before, session.progress_every):
            if self._row(validates=validates):
                return True
            if self.best_model.ended is not None:
                return True
        if self.learner.samples >= self.minibatches.total:
            return True
        searched = crossed(before, None) and self._search_minibatch_size()
        if checkpoints and (checkpoints.due(before) or self._is_best):
            self._save(checkpoints, self.state, best=self._is_best)
        return searched

    # Rows of metrics, and their consequences.

    def _row(self, *, validates: bool) -> bool:
        """Make a row, and carry out its consequences.

        Returns:
            Whether an earlier model was restored.
        """
        state, evaluation, best_model = self.state, self.evaluation, self.best_model
        if not evaluation.has_rows:
            state.begin_row()
            return False
        row, moved = self.not_finite.with_skips(evaluation.row(state, validates=validates)), False
        last = self.learner.samples >= self.minibatches.total
        state.begin_row()
        criterion = evaluation.criterion(row)
        self._require_finite(row)
        if criterion is not None:
            row, moved = best_model.adjust(row, criterion, state, last=last)
            self._criterion = criterion if math.isfinite(criterion) else None
            row = replace(row, **evaluation.next_step_fields(state))
        if not self._run_callbacks(row.finite()) and best_model.ended is None:
            best_model.ended = BY_CALLBACK
        self._add_row(row)
        if moved:
            self._remove_later_checkpoints()
        if not last and best_model.ended is None:  # the last row comes with the final model
            self.output.report_rows(state.history[-1:])
        return moved

    def _roll_back(self, problem: str) -> None:
        """Continue from the best model after a failed step. Collective."""
        row = self.evaluation.row(self.state, validates=False).with_event(problem)
        self.state.begin_row()
        row, _ = self.best_model.adjust(row, math.nan, self.state, last=False)
        self._add_row(row)
        self._remove_later_checkpoints()
        if self.best_model.ended is None:
            self.output.report_rows(self.state.history[-1:])

    def _reduce(self, error: DivergedError) -> None:
        """Continue at a lower learning rate from the newest good state. Collective."""
        row = self.evaluation.row(self.state, validates=False).with_event(str(error))
        did, samples = self.not_finite.restore_good_state(error, self.state)
        self._add_row(replace(row.with_event(did), **self.evaluation.next_step_fields(self.state)))
        self._remove_later_checkpoints(samples)
        self.output.report_rows(self.state.history[-1:])

    def _add_row(self, row: Progress) -> None:
        """Append a row. The row names the reason if training ends early."""
        ended = self.best_model.ended
        self.state.history.append((row.with_event(ended) if ended else row).finite())

    def _require_finite(self, row: Progress) -> None:
        """End training if it has diverged and no earlier model can be restored."""
        losses = {name: value for name, value in row.metrics.items() if name.endswith("_loss")}
        for name, loss in {"train_loss": row.train_loss, **losses}.items():
            if loss is not None and not math.isfinite(loss) and not self.best_model.can_roll_back:
                problem = (
                    f"training has diverged: the {name.replace('_', ' ')} is {loss} after "
                    f"{row.samples} samples; {SMALLER_RATE}"
                )
                if self.not_finite.reduces:
                    raise DivergedError(problem)
                self.evaluation.fail(problem)

    def _run_callbacks(self, row: Progress) -> bool:
        """Call all callbacks on all ranks. Return False if a callback on any rank ends training."""
        callbacks = self.session.callbacks
        if not callbacks:
            return True
        ended: list[bool] = []
        call = CallOnce(
            lambda: ended.extend(ends(run_callback(callback, row)) for callback in callbacks)
        )

        def agreed() -> bool:
            self.comm.together(call)
            return not any(self.comm.allgather_object(any(ended)))

        return self.learner.recovery.collective(agreed)

    # The minibatch size.

    def _search_minibatch_size(self) -> bool:
        """Search the minibatch size if due, after an epoch. Return whether the search was done."""
        auto, state, minibatches = self.session.auto_minibatch_size, self.state, self.minibatches
        epochs = (self.learner.samples - minibatches.start) // minibatches.epoch
        if auto is None or epochs % auto.minibatch_size_tuning_frequency:
            return False
        base = size_after(minibatches.sizes, minibatches.start)
        sizes = auto.candidates(base, minibatches.size_after(self.learner.samples))
        samples = max(auto.trial_samples, 2 * sizes[-1])
        self._search_from.take(self.learner)
        with self.learner.recovery.pause():
            state.size = auto.search(sizes, lambda size: self._trial_loss(size, samples))
        return True

    def _trial_loss(self, size: int, samples: int) -> float:
        """Return the mean training loss of a trial with minibatches of a size. Collective.

        Then all state is restored, except the seconds.

        Args:
            size: samples of all ranks in a minibatch.
            samples: samples of all ranks to train on.
        """
        learner, kept, criterion = self.learner, self.state, self._criterion
        self.state = replace(kept, size=size, loss=0.0, count=0)
        end = learner.samples + samples
        try:
            with learner.timer.outside_training("search the minibatch size"):
                for batch in self.minibatches:
                    self._step(batch)
                    if learner.samples >= end:
                        break
                local = float(self.state.loss), self.state.count
                sums = self.comm.allgather_object(local)
                count = sum(count for _, count in sums)  # 0 if all minibatches were skipped
                loss = float(sum(loss for loss, _ in sums) / count) if count else math.inf
        except DivergedError:
            loss = math.inf
        kept.seconds, self.state, self._criterion = self.state.seconds, kept, criterion
        self._search_from.restore(learner)
        return loss

    # Checkpoints.

    def _save(self, checkpoints: SessionCheckpoints, state: SessionState, *, best: bool) -> None:
        """Save all state with a state of the session. Collective.

        Raises:
            RanksChanged: training has rolled back instead.
        """
        checkpoints.save(state, best=best)
        self._require_same_ranks()

    def _save_missing_best(self) -> None:
        """Save the best model, if a failure of ranks has kept it from the disk: a run that is
        resumed needs it. Collective."""
        checkpoints, state = self.checkpoints, self.state
        if checkpoints is not None and not checkpoints.has(state.best):
            self._save(checkpoints, state.at_best(), best=True)
            checkpoints.wait()

    @property
    def _is_best(self) -> bool:
        """Return whether the present model is the best so far, as known to all ranks. Local."""
        known = self.evaluation.collective and self._criterion is not None
        best, samples = self.state.best, self.state.best_samples
        return known and self._criterion == best and self.learner.samples == samples

    def _save_at_end(self, *, needed: bool) -> None:
        """Wait until all checkpoints are on the disk. Collective.

        Args:
            needed: save a last checkpoint first.
        """
        checkpoints, recovery = self.checkpoints, self.learner.recovery
        if checkpoints is None:
            return

        def saved() -> None:
            if needed:
                self._save(checkpoints, self.state, best=self._is_best)
            checkpoints.wait()

        recovery.collective(saved)
        self._require_same_ranks()  # this rank may have rolled back before the other ranks
        recovery.attempt(self.learner.meet)  # if a rank has failed, nothing may have been saved
        self._require_same_ranks()

    def _remove_later_checkpoints(self, samples: int = 0) -> None:
        """Remove checkpoints newer than the restored state. Collective.

        Args:
            samples: samples of the restored state. 0: those of the best model.
        """
        checkpoints, samples = self.checkpoints, max(samples, self.state.best_samples)
        if checkpoints:
            checkpoints.wait()
            self.output.on_first_rank(lambda: checkpoints.remove_newer(samples))


def ends(answer: Any) -> bool:
    """Return whether a callback's answer ends training: False does, also NumPy's. Local."""
    return isinstance(answer, bool | np.bool_) and not answer
