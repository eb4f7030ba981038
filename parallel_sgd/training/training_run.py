"""A session at work: the loop over minibatches, and what happens between two of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from ..data.minibatches import size_after, told_size
from ..errors import DivergedError, UserError
from ..validation import line_of
from .adjusting import Adjusting
from .feeding import Feeding
from .learner import Learner
from .measuring import Measuring
from .not_finite import NotFiniteAtWork
from .objective import Batch, pieces_of
from .progress import Progress, Standing, loss_curves
from .progress_bar import ProgressBar, require_tqdm
from .rank_log import RankLog
from .run_folder import RunFolder
from .session_checkpoints import SessionCheckpoints
from .session_options import SessionOptions
from .snapshot import Snapshot

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

    Creation is collective.
    """

    def __init__(self, session: SessionOptions, learner: Learner, best: Snapshot) -> None:
        self.session, self.learner, self.comm = session, learner, learner.comm
        survival = learner.survival
        kept = None if survival is None else survival.keep(self._kept)
        self.standing = Standing()
        self._start: int = learner.samples if kept is None else kept["start"]
        self.feeding = self.comm.together(
            lambda: Feeding(session, learner, lambda: self.standing.size, self._start)
        )
        self.measuring = self.comm.together(lambda: Measuring(session, learner, self.feeding))
        self.adjusting = Adjusting(session, learner, best)
        self.not_finite = self.comm.together(
            lambda: NotFiniteAtWork(session.not_finite, learner, self.feeding)
        )
        self.checkpoints: SessionCheckpoints | None = None
        self.log: RankLog | None = None
        self._bar: ProgressBar | None = None
        self._search_from = Snapshot()
        self._criterion: float | None = None  #: of the model as it is now
        self._trained = self._finished = self._begun = False
        self._generation = self.comm.generation
        if kept is not None:  # ranks have died in the midst of the run
            self._go_on_from(kept)

    def run(self) -> list[Progress] | None:
        """Train to the end; None where the ranks are others before. Collective."""
        self._agree()
        try:
            with self.checkpoints or nullcontext(), self.not_finite:
                self._begin()
                self.not_finite.keep(self.standing)
                while self.learner.samples < self.feeding.total and self.adjusting.ended is None:
                    self._train()
                self._end()
        except OtherRanks:
            return None
        except BaseException as error:
            if self.log:
                self.log.write_error(error)
            with suppress(UserError):  # the first error is the one to tell
                self._close_folder()
            raise
        finally:
            if self._bar:
                self._bar.close()
        return self.standing.history if self.measuring.observes else []

    # Where ranks die, or join.

    def _kept(self) -> dict[str, Any]:
        """What goes back with the learner where ranks have died. Local."""
        return {
            "standing": self.standing.as_dict(),
            "criterion": self._criterion,
            "ended": self.adjusting.ended,
            "trained": self._trained,
            "begun": self._begun,
            "start": self._start,
        }

    def _go_on_from(self, kept: dict[str, Any]) -> None:
        """The learner has gone back to where this was kept, on this rank or another. Local."""
        standing = Standing.of([kept["standing"]], 0, 1)
        assert standing is not None
        survival = self.learner.survival
        if survival is not None and survival.has_joined:
            standing.begin_row()  # the sum of the rank whose place it takes is lost
        self.standing, self._criterion = standing, kept["criterion"]
        self.adjusting.ended = kept["ended"]
        self._trained, self._begun = kept["trained"], kept["begun"]

    def _copy(self, *, new_row: bool) -> None:
        """What is to be done after a step has been: take a copy, where one is due. Local."""
        survival = self.learner.survival
        if survival is not None:
            survival.commit() if new_row else survival.stepped()

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
            }
        )
        self.feeding.meet()
        facts = self.feeding.facts | self.measuring.meet()
        if checkpoints:
            self.checkpoints = SessionCheckpoints(session, self.learner, self.feeding, facts)

    def _begin(self) -> None:
        """Go on from where a checkpoint has been, and begin to write, when all is known to be
        right: what the folder held is replaced. Collective."""
        folder, checkpoints, resumed = self.session.folder, self.checkpoints, None
        again, self._begun = self._begun, True
        if again:
            self.adjusting.share(self.standing)
        elif checkpoints:
            self.standing, resumed = checkpoints.take_up(self.adjusting)
        rows, ended = self.standing.history, self.adjusting.ended is not None
        if ended or self.learner.samples >= self.feeding.total:  # the last one is written anew
            rows = rows[:-1]

        def create() -> None:
            if self.session.progress_bar:
                require_tqdm()
            if folder:
                folder.resumed = folder.resumed or self.comm.generation > 0
                folder.create([row.as_dict() for row in rows])
            if checkpoints:
                checkpoints.begin_after(resumed)
            if self.session.started and not again:
                called(self.session.started, self.learner)
            if self.session.progress_bar:
                self._bar = ProgressBar(self.feeding.total, self.learner.samples)

        self._on_first(create)
        if folder:
            self.log = RankLog(folder.path, self.comm.world_ranks[self.comm.rank])
            self.comm.together(self.log.create)
        if self.learner.algorithm.asynchronous:  # who is ready first would be far ahead
            self.learner.meet()

    def _end(self) -> None:
        """Complete the model, and what is written of it."""
        learner, folder, history = self.learner, self.session.folder, self.standing.history
        adjusting, standing = self.adjusting, self.standing
        goes_back = adjusting.finish()
        if goes_back:
            self._criterion = standing.best
            adjusting.ended = adjusting.ended or "ended with the best model"
        if adjusting.ended is not None and adjusting.ended != BY_CALLBACK:
            standing.ended, standing.total = adjusting.ended, self.feeding.total
        if self.checkpoints:
            if self._trained:
                self._save(self.checkpoints)
            self.checkpoints.wait()
            self._require_same_ranks()
        learner.finish()  # may change the model: the last row is of the final one
        self._finished = True
        final = self.measuring.final()
        if history:
            row = replace(history[-1], **final).finite()
            event = f"back to the model of {standing.best_samples} samples"
            back = goes_back and standing.best_samples < row.samples
            history[-1] = row.with_event(event) if back else row
        if folder:
            self._on_first(lambda: self._complete(folder))
        self._tell(history[-1:])
        self._on_first(self._close_folder)

    def _close_folder(self) -> None:
        if self.session.folder:
            self.session.folder.close()

    def _complete(self, folder: RunFolder) -> None:
        """Write what is there of a run when it has ended. Local."""
        folder.write_model(self.learner.parameters)
        curves = loss_curves(self.standing.history)
        if folder.plot and curves:
            folder.write_loss_curves(curves)

    # The loop.

    def _train(self) -> None:
        """Train until the end, or until the place in the data has changed."""
        for batch in self.feeding:
            before, rows = self.learner.samples, len(self.standing.history)
            try:
                self._step(batch)
                self.not_finite.keep(self.standing, before)
                moved = self._between(before)
            except DivergedError as error:
                if self.not_finite.reduces:
                    self._reduce(error)
                elif self.adjusting.can_roll_back:
                    self._undo(str(error))
                else:
                    raise
                self._copy(new_row=True)
                return
            self._copy(new_row=len(self.standing.history) > rows)
            if moved:
                return

    def _step(self, batch: Batch) -> None:
        """Train on a minibatch, and count it."""
        learner, standing, session = self.learner, self.standing, self.session
        begin = time.perf_counter()
        adjusts = session.auto_learning_rate is not None or self.not_finite.reduces
        if adjusts or session.rate_follows is not None:
            factor = standing.factor * self.feeding.rate_factor(learner.samples)
            learner.local_step.state.lr_factor = factor
        samples = self.feeding.samples_of(batch)
        loss = session.objective.backward(learner, pieces_of(batch, session.microbatch_size))
        counts = self.not_finite.counts(loss)
        if counts and (learner.distributed or self.comm.rank == 0):  # before, all have the same
            standing.loss += loss
            standing.count += samples
        learner.step(samples, self.not_finite.to_judge(loss))
        self._require_same_ranks()
        self._trained, self._criterion = True, None
        standing.seconds += time.perf_counter() - begin
        if self._bar:
            self._bar.show(learner.samples)

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
            if self.adjusting.ended is not None:
                return True
        if self.learner.samples >= self.feeding.total:
            return True
        searched = crossed(before, None) and self._search_minibatch_size()
        known = self.measuring.meets and self._criterion is not None
        best = known and self._criterion == self.standing.best
        if checkpoints and (checkpoints.due(before) or best):
            self._save(checkpoints)
            self._require_same_ranks()
        return searched

    # Rows of metrics, and what follows from them.

    def _row(self, *, validates: bool) -> bool:
        """Make a row, and do what it asks for; whether training goes on from an earlier model."""
        standing, measuring, adjusting = self.standing, self.measuring, self.adjusting
        if not measuring.observes:
            standing.begin_row()
            return False
        row, moved = self.not_finite.noted(measuring.row(standing, validates=validates)), False
        last = self.learner.samples >= self.feeding.total
        standing.begin_row()
        criterion = measuring.criterion(row)
        self._require_finite(row)
        if criterion is not None:
            row, moved = adjusting.adjust(row, criterion, standing, last=last)
            self._criterion = criterion if math.isfinite(criterion) else None
            row = replace(row, **measuring.next_step(standing))
        if not self._call_back(row.finite()) and adjusting.ended is None:
            adjusting.ended = BY_CALLBACK
        self._note(row)
        if moved:
            self._forget_later_checkpoints()
        if not last and adjusting.ended is None:  # else it is told when the model is complete
            self._tell(standing.history[-1:])
        return moved

    def _undo(self, problem: str) -> None:
        """Go on from the best model after a step that could not be taken. Collective."""
        row = self.measuring.row(self.standing, validates=False).with_event(problem)
        self.standing.begin_row()
        row, _ = self.adjusting.adjust(row, math.nan, self.standing, last=False)
        self._note(row)
        self._forget_later_checkpoints()
        if self.adjusting.ended is None:
            self._tell(self.standing.history[-1:])

    def _reduce(self, error: DivergedError) -> None:
        """Go on at a lower rate from the newest good state. Collective."""
        row = self.measuring.row(self.standing, validates=False).with_event(str(error))
        did, samples = self.not_finite.go_back(error, self.standing)
        self._note(replace(row.with_event(did), **self.measuring.next_step(self.standing)))
        self._forget_later_checkpoints(samples)
        self._tell(self.standing.history[-1:])

    def _note(self, row: Progress) -> None:
        """Keep a row, which says why training ends, if it does."""
        ended = self.adjusting.ended
        self.standing.history.append((row.with_event(ended) if ended else row).finite())

    def _require_finite(self, row: Progress) -> None:
        """End training where it has diverged, and no earlier model is there to go back to."""
        losses = {name: value for name, value in row.metrics.items() if name.endswith("_loss")}
        for name, loss in {"train_loss": row.train_loss, **losses}.items():
            if loss is not None and not math.isfinite(loss) and not self.adjusting.can_roll_back:
                problem = (
                    f"training has diverged: the {name.replace('_', ' ')} is {loss} after "
                    f"{row.samples} samples; a smaller learning rate may help"
                )
                if self.not_finite.reduces:
                    raise DivergedError(problem)
                self.measuring.fail(problem)

    def _call_back(self, row: Progress) -> bool:
        """Call all callbacks, on all ranks; whether none of them, on any rank, has ended
        training."""
        callbacks = self.session.callbacks
        if not callbacks:
            return True
        answers = self.comm.together(lambda: [called(callback, row) for callback in callbacks])
        return all(self.comm.allgather_object(not any(map(ends, answers))))

    def _tell(self, rows: list[Progress]) -> None:
        """Write rows, and report them."""
        folder, report = self.session.folder, self.session.report

        def tell() -> None:
            for row in rows:
                if folder:
                    folder.append_metrics(row.as_dict())
                if report:
                    with self._bar.set_aside() if self._bar else nullcontext():
                        called(report, row)

        self._on_first(tell)
        for row in rows:
            self._log(f"{row.samples} samples, {row.seconds} s, train loss {row.train_loss}")

    def _log(self, text: str) -> None:
        """Write a line into this rank's log; where it cannot, all ranks end."""
        if self.log is None:
            return
        try:
            self.log.write(text)
        except UserError as error:
            if self._finished:
                raise
            self.learner.fail(str(error))

    def _on_first(self, work: Callable[[], object]) -> None:
        """Let the first rank write; where it cannot, all ranks end. Collective where they meet."""
        first = self.comm.rank == 0
        if self.measuring.meets or self._finished or not self._trained:
            self.comm.together(lambda: work() if first else None)
        elif first:
            try:
                work()
            except UserError as error:
                self.learner.fail(str(error))

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
        survival = self.learner.survival
        return survival.paused() if survival else nullcontext()

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
        checkpoints.save(self.standing, self._criterion if self.measuring.meets else None)

    def _forget_later_checkpoints(self, samples: int = 0) -> None:
        """After training has gone back to the best model, or to so many samples. Collective."""
        checkpoints, samples = self.checkpoints, max(samples, self.standing.best_samples)
        if checkpoints:
            checkpoints.wait()
            self._on_first(lambda: checkpoints.forget_after(samples))


def ends(answer: Any) -> bool:
    """Whether a callback's answer ends training: False does, also NumPy's. Local."""
    return isinstance(answer, bool | np.bool_) and not answer


def called(callback: Callable[[Any], Any], row: Any) -> Any:
    """What a callback gives; what it raises is told on all ranks. Local."""
    try:
        return callback(row)
    except (UserError, BrokenPipeError):  # the latter: nobody reads what is printed
        raise
    except Exception as error:
        name = getattr(callback, "__name__", type(callback).__name__)
        raise UserError(
            f"callback {name} failed: {type(error).__name__}: {line_of(error)}"
        ) from error
