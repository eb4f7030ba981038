"""A training session: epochs, evaluation, checkpoints, progress on rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..algorithms import Algorithm
from ..communication import Communicator
from ..data import Dataset, Source, require_same_data
from ..errors import SharedError
from ..models import Classifier
from ..optimizers import Optimizer
from ..validation import integer, require_use
from .checkpoint_files import set_aside_after
from .checkpoints import Checkpoints
from .learner import Learner
from .loading import load_checkpoint
from .progress import Observer, Progress, Standing
from .run_folder import RunFolder
from .trace_file import traced


@dataclass(frozen=True, kw_only=True)
class Session:
    """All that a training run needs; `run` carries it out.

    Args:
        model: trained in place.
        train, test: data sets that every rank can read.
        optimizer, algorithm, comm: as for `Learner`.
        minibatch_size: samples of all ranks together in a minibatch.
        epochs: passes over `train`.
        seed: of the order of the samples.
        folder: made and written to; None, as on all ranks but one, writes nothing.
        report: called on rank 0 after each epoch.
        started: called on the first rank that trains, before its first minibatch.
        checkpoints: the folder for checkpoints, which all ranks share; None: there are none.
        checkpoint_every: so many samples of all ranks lie between two checkpoints. One more is
            taken after every epoch whose test loss is the lowest so far, and one at the end.
        keep: how many of the latest checkpoints to keep, beside the one of the lowest test loss.
        resume: a checkpoint, or the folder of checkpoints or of a run, whose newest is taken.
        trace: a file for what every rank does when, as `traced` writes it; with parameter servers
            not after an error.
        sync_perf_stats: as for `Learner`.
    """

    model: Classifier
    train: Dataset
    test: Dataset
    optimizer: Optimizer
    algorithm: Algorithm[Any]
    comm: Communicator
    minibatch_size: int
    epochs: int
    seed: int
    folder: RunFolder | None = None
    report: Callable[[Progress], None] = lambda progress: None
    started: Callable[[Learner], None] = lambda learner: None
    checkpoints: str | os.PathLike[str] | None = None
    checkpoint_every: int = 0
    keep: int = 3
    resume: str | os.PathLike[str] | None = None
    trace: str | os.PathLike[str] | None = None
    sync_perf_stats: int = 0

    def run(self) -> list[Progress]:
        """Train, and return the progress after every epoch, the same on all ranks. Collective.

        Ranks that only serve, and of asynchronous workers all but the first, return no rows.

        Raises:
            UserError: on all ranks, if the options disagree, the folder cannot be made, data are
                bad on any rank, training diverges, a checkpoint cannot be written, or the one to
                be resumed is damaged or of another run, or the trace cannot be written.
        """
        comm = self.comm
        comm.require_agreement({"trace": self.trace is not None})
        if self.trace is None:
            return self._run()
        with traced(self.trace, comm, after_errors=self.algorithm.roles.together):
            return self._run()

    def _run(self) -> list[Progress]:
        comm = self.comm
        source = comm.together(self._source)
        comm.require_agreement(
            {
                "seed": self.seed,
                "number of samples": len(self.train),
                "number of test samples": len(self.test),
                "checkpoint_every": self.checkpoint_every,
                "resume": self.resume and str(self.resume),
            }
        )
        saver = comm.together(self._saver)
        learner = Learner(
            self.model.parameters,
            self.optimizer,
            self.algorithm,
            comm,
            sync_perf_stats=self.sync_perf_stats,
            minibatch_size=self.minibatch_size,
        )
        with learner, saver or nullcontext():
            return self._train(learner, source, saver)

    def _train(self, learner: Learner, source: Source, saver: Checkpoints | None) -> list[Progress]:
        if learner.serves:
            learner.finish()
            return []
        facts = self._met(source, learner)
        if saver:
            saver.facts = facts
        standing, resumed = self._take_up(learner, facts)
        observer, history = Observer(learner, self.model, self.test), standing.history
        earlier = history[: self.epochs - 1]
        # When all else is known to be right.
        learner.comm.together(lambda: self._create(earlier, resumed))
        if learner.comm.rank == 0:
            self.started(learner)
        if self.algorithm.asynchronous:  # who is ready first would be far ahead of the others
            learner.meet()
        for epoch in range(len(history), self.epochs):
            self._train_epoch(source, epoch, learner, standing, saver)
            if observer.observes:
                with learner.aside("evaluate"):
                    history.append(observer.progress(epoch + 1, standing))
                if epoch + 1 < self.epochs:
                    self._tell(history[-1], learner)
            standing.loss, standing.count = 0.0, 0
            self._save_epoch(epoch + 1, learner, standing, saver)
        if saver:
            saver.wait()
        learner.finish()  # may change the model: the last row is of the final one
        if observer.observes:
            history[-1] = replace(history[-1], **observer.measured())
            self._tell(history[-1], learner)
        if self.folder:
            self.folder.write_model(self.model.parameters)
        return history if observer.observes else []

    def _tell(self, progress: Progress, learner: Learner) -> None:
        if self.folder:
            self.folder.append_metrics(progress.as_dict())
        if learner.comm.rank == 0:
            self.report(progress)

    def _saver(self) -> Checkpoints | None:
        every = integer("checkpoint_every", self.checkpoint_every, 0)
        integer("keep", self.keep, 1)
        needs = "checkpoint_every of more than 0"
        require_use("keep", self.keep, type(self).keep, every > 0, needs)
        if self.checkpoints is None or every == 0:
            return None
        return Checkpoints(self.checkpoints, keep=self.keep)

    def _met(self, source: Source, learner: Learner) -> dict[str, Any]:
        """See that all ranks read the same data; what must be so when the run is resumed.
        Collective."""
        source.meet(learner)
        test = require_same_data("test data", self.test, learner.comm, classes=self.model.classes)
        return {
            "seed": self.seed,
            "minibatch_size": self.minibatch_size,
            "number of samples": len(self.train),
            "number of test samples": len(self.test),
            "training data": source.fingerprint(learner),
            "test data": test,
        }

    def _take_up(self, learner: Learner, facts: dict[str, Any]) -> tuple[Standing, Path | None]:
        """Where the session begins, and the checkpoint that says so. Collective."""
        if self.resume is None:
            return Standing(), None
        loaded = load_checkpoint(learner, self.resume, facts=facts)
        standing = Standing.of(loaded.extras, learner.comm.rank, learner.comm.size)
        if standing is None:
            raise SharedError(f"checkpoint {str(loaded.path)!r} is not of a training session")
        seen = len(standing.history)
        if seen > self.epochs:
            raise SharedError(
                f"epochs={self.epochs} must be at least the {seen} that checkpoint "
                f"{str(loaded.path)!r} has seen"
            )
        return standing, loaded.path

    def _create(self, history: list[Progress], resumed: Path | None) -> None:
        """Begin to write: from here on what the folder held is replaced."""
        if self.folder is None:
            return
        self.folder.create([progress.as_dict() for progress in history])
        here = self.checkpoints and Path(self.checkpoints).resolve()
        if resumed and resumed.resolve().parent == here:
            set_aside_after(resumed)

    def _save(
        self,
        saver: Checkpoints,
        learner: Learner,
        standing: Standing,
        test_loss: float | None = None,
    ) -> None:
        extra = asdict(standing)
        if learner.comm.rank:  # one is enough
            extra["history"] = []
        with learner.aside("checkpoint"):
            saver.save(learner, extra=extra, metric=test_loss)

    def _save_epoch(
        self, epochs: int, learner: Learner, standing: Standing, saver: Checkpoints | None
    ) -> None:
        """After an epoch: a checkpoint where one is due, where it is the best, and at the end.

        Of asynchronous workers there is no best one: they do not know the first one's losses.
        """
        if saver is None:
            return
        losses = [progress.test_loss for progress in standing.history]
        before = learner.samples - learner.last_samples
        loss = None if self.algorithm.asynchronous else losses[-1]
        best = loss is not None and loss == min(losses)
        if best or epochs == self.epochs or self._due(before, learner):
            self._save(saver, learner, standing, loss)

    def _source(self) -> Source:
        return Source(
            self.train,
            minibatch_size=self.minibatch_size,
            epochs=self.epochs,
            seed=self.seed,
            dtype=self.model.parameters.dtype,
            classes=self.model.classes,
        )

    def _train_epoch(
        self,
        source: Source,
        epoch: int,
        learner: Learner,
        standing: Standing,
        saver: Checkpoints | None,
    ) -> None:
        """Train on one epoch, or what is left of it; adds this rank's part of the summed loss."""
        end = (epoch + 1) * len(self.train)
        before, begin = standing.seconds, time.perf_counter()
        for x, y in source.epoch(epoch, learner):
            loss = self.model.gradient(x, y, out=learner.gradient, ready=learner.ready)
            if learner.distributed or learner.comm.rank == 0:  # before that all have the same
                standing.loss += loss
                standing.count += len(x)
            seen = learner.samples
            learner.step(samples=len(x))
            standing.seconds = before + time.perf_counter() - begin
            if saver and learner.samples < end and self._due(seen, learner):
                self._save(saver, learner, standing)

    def _due(self, before: int, learner: Learner) -> bool:
        """Whether a checkpoint has come due since so many samples."""
        return learner.samples // self.checkpoint_every > before // self.checkpoint_every
