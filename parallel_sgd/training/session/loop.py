"""A session at work: the loop over minibatches, and what happens between two of them."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from ...communication.liveness.preemption import preempt_on
from ...data.sources.minibatches import size_after, told_size
from ...errors import SMALLER_RATE, DivergedError, Preempted, SharedError, UserError
from ...validation import one_number
from ..learner import Learner
from .batches import Batch, pieces_of
from .best_model import BestModel
from .checkpointing import SessionCheckpoints
from .evaluation import Evaluation
from .minibatches import Feeding
from .non_finite import NonFiniteRunner
from .options import SessionOptions
from .output import Once, RunOutput, called
from .preemption import Preemption
from .snapshot import Snapshot
from .state import Progress, SessionState

BY_CALLBACK = "ended by a callback"


class OtherRanks(Exception):
    """Ranks have died, or joined, and the learner has gone on with those that are left: what the
    run knows of its ranks is out of date."""


class TrainingRun:
    """One run of a session, on a rank that trains.

    Args:
        session: whose values have been checked.
        learner: its learner.
        best: where the best model is kept.
        preemption: of the session, on this rank.

    Creation is collective.
    """

    def __init__(
        self, session: SessionOptions, learner: Learner, best: Snapshot, preemption: Preemption
    ) -> None:
        self.session, self.learner, self.comm = session, learner, learner.comm
        recovery = learner.recovery
        kept = None if recovery is None else recovery.keep(self._kept)
        self.standing = SessionState()
        self._start: int = learner.samples if kept is None else kept["start"]
        self.feeding = self.comm.together(
            lambda: Feeding(session, learner, lambda: self.standing.size, self._start)
        )
        self.evaluation = self.comm.together(lambda: Evaluation(session, learner, self.feeding))
        self.best_model = BestModel(session, learner, best)
        self.not_finite = self.comm.together(
            lambda: NonFiniteRunner(session.not_finite, learner, self.feeding)
        )
        self.preemption = preemption
        preemption.begin()
        self.checkpoints: SessionCheckpoints | None = None
        self.output = RunOutput(session, learner, meets=self.evaluation.meets)
        self._search_from = Snapshot()
        self._criterion: float | None = None  #: of the model as it is now
        self._begun = False
        self._generation = self.comm.generation
        if kept is not None:  # ranks have died in the midst of the run
            self._go_on_from(kept)

    def begin(self) -> TrainingRun:
        """All that comes before the first minibatch; the run itself. Collective."""
        self._agree()
        try:
            self._begin()
        except BaseException as error:
            self.output.fail(error)
            self.output.close()
            raise
        return self

    def run(self) -> list[Progress] | None:
        """Train to the end; None where the ranks are others before. Collective."""
        try:
            with self.checkpoints or nullcontext(), self.not_finite:
                self.not_finite.keep(self.standing)
                while self._goes_on():
                    self._train()
                self.preemption.leave_if_agreed(self._leave)
                self._end()
                self.preemption.tell_servers()
        except OtherRanks:
            return None
        except Preempted:
            raise
        except BaseException as error:
            self.output.fail(error)
            raise
        finally:
            self.learner.local_step.state.lr_factor = 1.0  # of this session alone
            self.output.close()
        return self.standing.history if self.evaluation.observes else []

    # Where ranks die, or join.

    def _kept(self) -> dict[str, Any]:
        """What goes back with the learner where ranks have died. Local."""
        return {
            "standing": self.standing.as_dict(),
            "criterion": self._criterion,
            "ended": self.best_model.ended,
            "ends_with_best": self.best_model.ends_with_best,
            "trained": self.output.trained,
            "begun": self._begun,
            "start": self._start,
        }

    def _go_on_from(self, kept: dict[str, Any]) -> None:
        """The learner has gone back to where this was kept, on this rank or another. Local."""
        standing = SessionState.of([kept["standing"]], 0, 1)
        assert standing is not None
        recovery = self.learner.recovery
        if recovery is not None and recovery.has_joined:
            standing.begin_row()  # the sum of the rank whose place it takes is lost
        self.standing, self._criterion = standing, kept["criterion"]
        self.best_model.ended = kept["ended"]
        self.best_model.ends_with_best = kept["ends_with_best"]
        self.output.trained, self._begun = kept["trained"], kept["begun"]

    def _copy(self, *, new_row: bool) -> None:
        """What is to be done after a step has been: take a copy, where one is due. Local."""
        recovery = self.learner.recovery
        if recovery is not None:
            recovery.commit() if new_row else recovery.stepped()

    def _require_same_ranks(self) -> None:
        if self.comm.generation != self._generation:
            raise OtherRanks

    # The beginning and the end.

    def _agree(self) -> None:
        """See that all ranks were given the same, and know where checkpoints are. Collective."""
        session, checkpoints = self.session, self.session.checkpoints
        self.comm.require_agreement(
            {
                "minibatch_size": told_size(self.feeding.sizes),
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
                "preempt_on": [number.name for number in preempt_on()],
            }
        )
        self.feeding.meet()
        facts = self.feeding.facts | self.evaluation.meet()
        self.output.hold_folder()
        if checkpoints:
            self.checkpoints = SessionCheckpoints(session, self.learner, self.feeding, facts)

    def _begin(self) -> None:
        """Go on from where a checkpoint has been, and begin to write, when all is known to be
        right. Collective."""
        session, checkpoints, resumed = self.session, self.checkpoints, None
        again = self._begun
        if again:
            self.best_model.share(self.standing)
        elif checkpoints:
            self.standing, resumed = checkpoints.resume_from(self.best_model)
        rows, ended = self.standing.history, self.best_model.ended is not None
        if ended or self.learner.samples >= self.feeding.total:  # the last one is written anew
            rows = rows[:-1]

        def begun() -> None:
            if checkpoints:
                checkpoints.begin_after(resumed)
            if session.started and not again:
                called(session.started, self.learner)

        self.output.begin(rows, self.feeding.total, begun)
        self._begun = True
        if resumed:  # the copy that was taken as it was loaded knows nothing of this run
            self._copy(new_row=True)
        if self.learner.algorithm.asynchronous:  # who is ready first would be far ahead
            self.learner.meet()

    def _end(self) -> None:
        """Complete the model, and what is written of it."""
        output, history = self.output, self.standing.history
        best_model, standing = self.best_model, self.standing
        self._require_same_ranks()
        goes_back = best_model.finish()
        if goes_back:
            self._criterion = standing.best
        if best_model.ended is not None and best_model.ended != BY_CALLBACK:
            standing.ended, standing.total = best_model.ended, self.feeding.total
        self._save_at_end(needed=output.trained)
        samples = self.learner.samples
        self.learner.finish()  # may change the model: the last row is of the final one
        output.finished = True
        final = self.evaluation.final()
        if not history or (not self.evaluation.meets and history[-1].samples < samples):
            # Another rank has had the rows, and has died, or dies yet.
            history.append(self.evaluation.row(standing, validates=False))
        row = replace(history[-1], **final).finite()
        event = f"back to the model of {standing.best_samples} samples"
        back = goes_back and standing.best_samples < row.samples
        history[-1] = row.with_event(event) if back else row
        output.complete(history)

    def _leave(self) -> None:
        """Save what is needed to go on another time. Collective."""
        self._save_at_end(needed=True)

    # The loop.

    def _goes_on(self) -> bool:
        ended = self.best_model.ended is not None or self.preemption.agreed
        return self.learner.samples < self.feeding.total and not ended

    def _train(self) -> None:
        """Train until the end, or until the place in the data has changed."""
        for batch in self.feeding:
            before, rows = self.learner.samples, len(self.standing.history)
            try:
                if not self._step(batch):
                    continue
                self.not_finite.keep(self.standing, before)
                moved = self._between(before)
            except DivergedError as error:
                if self.not_finite.reduces:
                    self._reduce(error)
                elif self.best_model.can_roll_back:
                    self._undo(str(error))
                else:
                    raise
                self._copy(new_row=True)
                return
            self._copy(new_row=len(self.standing.history) > rows)
            if moved or self.preemption.stepped():
                return

    def _step(self, batch: Batch) -> int:
        """Train on a minibatch, and count it; its samples, of all ranks, or 0 where it is dealt out
        anew."""
        learner, standing, session = self.learner, self.standing, self.session
        begin = time.perf_counter()
        adjusts = session.auto_learning_rate is not None or self.not_finite.reduces
        if adjusts or session.rate_follows is not None:
            factor = standing.factor * self.feeding.rate_factor(learner.samples)
            learner.local_step.state.lr_factor = factor
        samples, loss = self._gradient(batch)
        counts, counted = self.not_finite.counts(loss), (standing.loss, standing.count)
        if counts and (learner.distributed or self.comm.rank == 0):  # before, all have the same
            standing.loss += loss
            standing.count += samples
        total = learner.step(samples, self.not_finite.to_judge(loss))
        self._require_same_ranks()
        if not total:
            standing.loss, standing.count = counted
            return 0
        self.output.trained, self._criterion = True, None
        standing.seconds += time.perf_counter() - begin
        self.output.show(learner.samples)
        return total

    def _gradient(self, batch: Batch) -> tuple[int, Any]:
        """Compute the gradient of a minibatch: its samples of this rank, and its loss.

        Raises:
            SharedError: on all ranks, if the minibatch or its loss is not as required on any.
        """
        try:
            samples = self.feeding.samples_of(batch)
            pieces = pieces_of(batch, self.session.microbatch_size, samples)
            loss = one_number("loss", self.session.objective.backward(self.learner, pieces))
        except SharedError:
            raise
        except UserError as error:
            self.learner.fail(str(error))
        return samples, loss

    def _between(self, before: int) -> bool:
        """Do what is due after a step; whether the place in the data has changed, or training ends.

        Args:
            before: the samples before it.
        """
        session, crossed = self.session, self.feeding.crossed
        validation, checkpoints = session.validation, self.checkpoints
        validates = validation is not None and crossed(before, validation.every)
        if validates or crossed(before, session.progress_every):
            if self._row(validates=validates):
                return True
            if self.best_model.ended is not None:
                return True
        if self.learner.samples >= self.feeding.total:
            return True
        searched = crossed(before, None) and self._search_minibatch_size()
        if checkpoints and (checkpoints.due(before) or self._is_best):
            self._save(checkpoints)
            self._require_same_ranks()
        return searched

    # Rows of metrics, and what follows from them.

    def _row(self, *, validates: bool) -> bool:
        """Make a row, and do what it asks for; whether training goes on from an earlier model."""
        standing, evaluation, best_model = self.standing, self.evaluation, self.best_model
        if not evaluation.observes:
            standing.begin_row()
            return False
        row, moved = self.not_finite.noted(evaluation.row(standing, validates=validates)), False
        last = self.learner.samples >= self.feeding.total
        standing.begin_row()
        criterion = evaluation.criterion(row)
        self._require_finite(row)
        if criterion is not None:
            row, moved = best_model.adjust(row, criterion, standing, last=last)
            self._criterion = criterion if math.isfinite(criterion) else None
            row = replace(row, **evaluation.next_step(standing))
        if not self._call_back(row.finite()) and best_model.ended is None:
            best_model.ended = BY_CALLBACK
        self._note(row)
        if moved:
            self._forget_later_checkpoints()
        if not last and best_model.ended is None:  # else it is told when the model is complete
            self.output.tell(standing.history[-1:])
        return moved

    def _undo(self, problem: str) -> None:
        """Go on from the best model after a step that could not be taken. Collective."""
        row = self.evaluation.row(self.standing, validates=False).with_event(problem)
        self.standing.begin_row()
        row, _ = self.best_model.adjust(row, math.nan, self.standing, last=False)
        self._note(row)
        self._forget_later_checkpoints()
        if self.best_model.ended is None:
            self.output.tell(self.standing.history[-1:])

    def _reduce(self, error: DivergedError) -> None:
        """Go on at a lower rate from the newest good state. Collective."""
        row = self.evaluation.row(self.standing, validates=False).with_event(str(error))
        did, samples = self.not_finite.go_back(error, self.standing)
        self._note(replace(row.with_event(did), **self.evaluation.next_step(self.standing)))
        self._forget_later_checkpoints(samples)
        self.output.tell(self.standing.history[-1:])

    def _note(self, row: Progress) -> None:
        """Keep a row, which says why training ends, if it does."""
        ended = self.best_model.ended
        self.standing.history.append((row.with_event(ended) if ended else row).finite())

    def _require_finite(self, row: Progress) -> None:
        """End training where it has diverged, and no earlier model is there to go back to."""
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

    def _call_back(self, row: Progress) -> bool:
        """Call all callbacks, on all ranks; whether none of them, on any rank, has ended
        training."""
        callbacks = self.session.callbacks
        if not callbacks:
            return True
        ended: list[bool] = []
        call = Once(lambda: ended.extend(ends(called(callback, row)) for callback in callbacks))

        def agreed() -> bool:
            self.comm.together(call)
            return not any(self.comm.allgather_object(any(ended)))

        return self.learner.all_come_through(agreed)

    # The minibatch size.

    def _search_minibatch_size(self) -> bool:
        """After an epoch: search it where it is time to; whether that was done."""
        auto, standing, feeding = self.session.auto_minibatch_size, self.standing, self.feeding
        epochs = (self.learner.samples - feeding.begins) // feeding.epoch
        if auto is None or epochs % auto.minibatch_size_tuning_frequency:
            return False
        base = size_after(feeding.sizes, feeding.begins)
        sizes = auto.candidates(base, feeding.size_after(self.learner.samples))
        samples = max(auto.trial_samples, 2 * sizes[-1])
        self._search_from.take(self.learner)
        with self._without_copies():
            standing.size = auto.search(sizes, lambda size: self._try(size, samples))
        return True

    def _without_copies(self) -> AbstractContextManager[object]:
        """While something is tried, to which no rank is to go back."""
        recovery = self.learner.recovery
        return recovery.paused() if recovery else nullcontext()

    def _try(self, size: int, samples: int) -> float:
        """The mean training loss of so many samples in minibatches of this size; then all but the
        seconds is as it was before. Collective."""
        learner, kept, criterion = self.learner, self.standing, self._criterion
        self.standing = replace(kept, size=size, loss=0.0, count=0)
        end = learner.samples + samples
        try:
            with learner.aside("search the minibatch size"):
                for batch in self.feeding:
                    self._step(batch)
                    if learner.samples >= end:
                        break
                own = float(self.standing.loss), self.standing.count
                sums = self.comm.allgather_object(own)
                count = sum(count for _, count in sums)  # 0 where all was left out
                loss = float(sum(loss for loss, _ in sums) / count) if count else math.inf
        except DivergedError:
            loss = math.inf
        kept.seconds, self.standing, self._criterion = self.standing.seconds, kept, criterion
        self._search_from.restore(learner)
        return loss

    # Checkpoints.

    def _save(self, checkpoints: SessionCheckpoints) -> None:
        """Save all state, and the session's. Collective."""
        checkpoints.save(self.standing, best=self._is_best)

    @property
    def _is_best(self) -> bool:
        """Whether the model as it is now is the best so far, as all ranks know. Local."""
        known = self.evaluation.meets and self._criterion is not None
        best, samples = self.standing.best, self.standing.best_samples
        return known and self._criterion == best and self.learner.samples == samples

    def _save_at_end(self, *, needed: bool) -> None:
        """Wait until all is on the disk, if need be with a last checkpoint. Collective."""
        checkpoints, recovery = self.checkpoints, self.learner.recovery
        if checkpoints is None:
            return

        def saved() -> None:
            if needed:
                self._save(checkpoints)
            checkpoints.wait()

        self.learner.all_come_through(saved)
        self._require_same_ranks()  # it may have gone back already, as others will
        if recovery is not None:  # where a rank has died meanwhile, nothing may have been saved
            recovery.fault_tolerant(self.learner.meet)
            self._require_same_ranks()

    def _forget_later_checkpoints(self, samples: int = 0) -> None:
        """After training has gone back to the best model, or to so many samples. Collective."""
        checkpoints, samples = self.checkpoints, max(samples, self.standing.best_samples)
        if checkpoints:
            checkpoints.wait()
            self.output.on_first(lambda: checkpoints.forget_after(samples))


def ends(answer: Any) -> bool:
    """Whether a callback's answer ends training: False does, also NumPy's. Local."""
    return isinstance(answer, bool | np.bool_) and not answer
