"""A training session: epochs, evaluation, checkpoints, progress on rank 0."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..algorithms import Algorithm
from ..communication import Communicator
from ..data import Dataset, Source
from ..errors import SharedError
from ..models import Classifier
from ..optimizers import Optimizer
from ..validation import integer
from .checkpoint_files import set_aside_after
from .checkpoints import Checkpoints
from .learner import Learner
from .loading import load_checkpoint
from .run_folder import RunFolder

FINGERPRINTED = 256  #: samples by which data are told from others
EVALUATED = 4096  #: samples that are read at a time to evaluate


@dataclass(frozen=True)
class Progress:
    """Where training stands after an epoch; a line of metrics.jsonl.

    Losses are mean cross-entropies in nats; `train_loss` is the mean over the epoch's minibatches,
    each before its own update. `bytes_sent` is the sum over all ranks, `seconds` counts training
    without evaluation. `details` is what the algorithm has to tell (`Algorithm.report`).

    Where workers train apart, at their own paces, the rows are the first worker's: the loss of its
    own part of the data, the test loss of the model that it has just pulled, the bytes that went to
    it and from it; the last row counts all workers' bytes, and its `details` are of all.
    """

    epoch: int
    samples: int
    train_loss: float
    test_loss: float
    test_accuracy: float
    learning_rate: float
    bytes_sent: int
    seconds: float
    details: dict[str, Any] | None = None


@dataclass
class Standing:
    """Where a session stands between two minibatches: its part of a checkpoint.

    Attributes:
        history: of the epochs that have ended.
        loss: this rank's part of the present epoch's summed loss so far.
        count: samples in it.
        seconds: of training so far.
    """

    history: list[Progress] = field(default_factory=list)
    loss: float = 0.0
    count: int = 0
    seconds: float = 0.0


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
        checkpoints: the folder for checkpoints, which all ranks share; None: there are none.
        checkpoint_every: so many samples of all ranks lie between two checkpoints. One more is
            taken after every epoch whose test loss is the lowest so far, and one at the end.
        keep: how many of the latest checkpoints to keep, beside the one of the lowest test loss.
        resume: a checkpoint, or the folder of checkpoints or of a run, whose newest is taken.
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
    checkpoints: str | os.PathLike[str] | None = None
    checkpoint_every: int = 0
    keep: int = 3
    resume: str | os.PathLike[str] | None = None

    def run(self) -> list[Progress]:
        """Train, and return the progress after every epoch, the same on all ranks. Collective.

        Ranks that only serve, and where workers train apart all but the first, return no rows.

        Raises:
            UserError: on all ranks, if the options disagree, the folder cannot be made, data are
                bad on any rank, training diverges, a checkpoint cannot be written, or the one to
                be resumed is damaged or of another run.
        """
        comm = self.comm
        source = comm.together(self._source)
        comm.require_agreement(
            {
                "number of test samples": len(self.test),
                "checkpoint_every": self.checkpoint_every,
                "resume": self.resume and str(self.resume),
            }
        )
        saver = comm.together(self._saver)
        learner = Learner(self.model.parameters, self.optimizer, self.algorithm, comm)
        if learner.serves:
            learner.finish()
            return []
        source.meet(learner)
        self.algorithm.check_minibatch(self.minibatch_size, learner.comm.size)
        standing, resumed = self._take_up(learner)
        history = standing.history
        told = history[: self.epochs - 1]
        # When all else is known to be right.
        learner.comm.together(lambda: self._create(told, resumed))
        for epoch in range(len(history), self.epochs):
            self._train_epoch(source, epoch, learner, standing, saver)
            if self._observes(learner):
                history.append(self._progress(epoch + 1, learner, standing))
                if epoch + 1 < self.epochs:
                    self._tell(history[-1], learner)
            standing.loss, standing.count = 0.0, 0
            self._save_epoch(epoch + 1, learner, standing, saver)
        if saver:
            saver.wait()
        learner.finish()  # may change the model: the last row is of the final one
        if self._observes(learner):
            history[-1] = replace(history[-1], **self._measured(learner))
            self._tell(history[-1], learner)
        if self.folder:
            self.folder.write_model(self.model.parameters)
        return history

    def _observes(self, learner: Learner) -> bool:
        """Whether this rank takes part in measuring progress: all do, or the first alone."""
        return not self.algorithm.apart or learner.comm.rank == 0

    def _observers(self, learner: Learner) -> Communicator:
        """The ranks that measure progress together."""
        return Communicator.single() if self.algorithm.apart else learner.comm

    def _tell(self, progress: Progress, learner: Learner) -> None:
        if self.folder:
            row = {name: value for name, value in asdict(progress).items() if value is not None}
            self.folder.append_metrics(row)
        if learner.comm.rank == 0:
            self.report(progress)

    def _saver(self) -> Checkpoints | None:
        every = integer("checkpoint_every", self.checkpoint_every, 0)
        integer("keep", self.keep, 1)
        if self.checkpoints is None or every == 0:
            return None
        return Checkpoints(self.checkpoints, keep=self.keep, facts=self._facts)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """What must be the same when the run is resumed."""
        return {
            "seed": self.seed,
            "minibatch_size": self.minibatch_size,
            "number of samples": len(self.train),
            "number of test samples": len(self.test),
            "training data": self._fingerprint(self.train),
            "test data": self._fingerprint(self.test),
        }

    def _fingerprint(self, data: Dataset) -> str:
        """Tells data from others by a few hundred of their samples."""
        few = np.linspace(0, len(data) - 1, FINGERPRINTED).astype(np.int64)
        x, y = data.read(np.unique(few), classes=self.model.classes)
        return hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()[:16]

    def _take_up(self, learner: Learner) -> tuple[Standing, Path | None]:
        """Where the session begins, and the checkpoint that says so. Collective."""
        if self.resume is None:
            return Standing(), None
        facts = learner.comm.together(lambda: self._facts)
        loaded = load_checkpoint(learner, self.resume, facts=facts)
        extras = loaded.extras
        if not all(isinstance(extra, dict) and "history" in extra for extra in extras):
            raise SharedError(f"checkpoint {str(loaded.path)!r} is not of a training session")
        history = [Progress(**row) for row in extras[0]["history"]]
        if len(history) > self.epochs:
            raise SharedError(
                f"epochs={self.epochs} must be at least the {len(history)} that checkpoint "
                f"{str(loaded.path)!r} has seen"
            )
        mine = extras[learner.comm.rank :: learner.comm.size]
        loss, count = (sum(extra[name] for extra in mine) for name in ("loss", "count"))
        return Standing(history, loss, count, extras[0]["seconds"]), loaded.path

    def _create(self, history: list[Progress], resumed: Path | None) -> None:
        """Begin to write: from here on what the folder held is replaced."""
        if self.folder is None:
            return
        self.folder.create([asdict(progress) for progress in history])
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
        saver.save(learner, extra=extra, metric=test_loss)

    def _save_epoch(
        self, epochs: int, learner: Learner, standing: Standing, saver: Checkpoints | None
    ) -> None:
        """After an epoch: a checkpoint where one is due, where it is the best, and at the end.

        Where workers train apart there is no best one: they do not know the first one's losses.
        """
        if saver is None:
            return
        losses = [progress.test_loss for progress in standing.history]
        before = learner.samples - learner.last_samples
        loss = None if self.algorithm.apart else losses[-1]
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
            loss = self.model.gradient(x, y, out=learner.gradient)
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

    def _progress(self, epoch: int, learner: Learner, standing: Standing) -> Progress:
        if not self.algorithm.apart:
            learner.meet()
        found = self._observers(learner).allgather_object((standing.loss, standing.count))
        loss, count = (sum(each) for each in zip(*found, strict=True))
        loss /= max(count, 1)
        self._require_finite("train", loss, learner)
        return Progress(
            epoch=epoch,
            samples=learner.samples,
            train_loss=loss,
            learning_rate=learner.local_step.lr,
            seconds=round(standing.seconds, 4),
            **self._measured(learner),
        )

    def _measured(self, learner: Learner) -> dict[str, Any]:
        """What can be measured at any time, of the model that all ranks have in common."""
        with learner.shared_model():
            loss, accuracy = self._evaluate(self._observers(learner))
        self._require_finite("test", loss, learner)
        return {
            "test_loss": loss,
            "test_accuracy": accuracy,
            "bytes_sent": self._bytes_sent(learner),
            "details": learner.report(),
        }

    def _bytes_sent(self, learner: Learner) -> int:
        """By all ranks; where workers train apart, between those that are known and servers."""
        if not self.algorithm.apart:
            return sum(learner.comm.allgather_object(learner.bytes_sent))
        workers = (learner.report() or {}).get("workers", [])
        return sum(each["bytes_sent"] + each["bytes_received"] for each in workers)

    def _require_finite(self, name: str, loss: float, learner: Learner) -> None:
        if math.isfinite(loss):
            return
        problem = (
            f"training has diverged: the {name} loss is {loss} after {learner.samples} "
            "samples; a smaller learning rate may help"
        )
        if self.algorithm.apart:
            learner.fail(problem)
        raise SharedError(problem)

    def _evaluate(self, comm: Communicator) -> tuple[float, float]:
        """Mean loss and accuracy on the test data, of which every rank takes a part."""
        shares = comm.allgather_object(comm.together(lambda: self._evaluate_part(comm)))
        loss, correct = (sum(share) for share in zip(*shares, strict=True))
        return loss / len(self.test), correct / len(self.test)

    def _evaluate_part(self, comm: Communicator) -> tuple[float, float]:
        """Summed loss and number of right answers on this rank's part of the test data."""
        dtype, classes = self.model.parameters.dtype, self.model.classes
        part = np.arange(len(self.test))[comm.rank :: comm.size]
        loss = correct = 0.0
        for first in range(0, len(part), EVALUATED):
            indexes = part[first : first + EVALUATED]
            x, y = self.test.read(indexes, dtype=dtype, classes=classes)
            mean_loss, accuracy = self.model.evaluate(x, y)
            loss += mean_loss * len(indexes)
            correct += round(accuracy * len(indexes))
        return loss, correct
