"""A training session: epochs, evaluation, progress on rank 0."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..algorithms import Algorithm
from ..communication import Communicator
from ..data import Dataset, Source
from ..errors import SharedError
from ..models import Classifier
from ..optimizers import Optimizer
from .learner import Learner
from .run_folder import RunFolder

EVALUATED = 4096  #: samples that are read at a time to evaluate


@dataclass(frozen=True)
class Progress:
    """Where training stands after an epoch; a line of metrics.jsonl.

    Losses are mean cross-entropies in nats; `train_loss` is the mean over the epoch's minibatches,
    each before its own update. `bytes_sent` is the sum over all ranks, `seconds` counts training
    without evaluation.
    """

    epoch: int
    samples: int
    train_loss: float
    test_loss: float
    test_accuracy: float
    learning_rate: float
    bytes_sent: int
    seconds: float


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

    def run(self) -> list[Progress]:
        """Train, and return the progress after every epoch, the same on all ranks. Collective.

        Raises:
            UserError: on all ranks, if the options disagree, the folder cannot be made, data are
                bad on any rank, or training diverges.
        """
        source = self.comm.together(self._source)
        self.comm.require_agreement({"number of test samples": len(self.test)})
        learner = Learner(self.model.parameters, self.optimizer, self.algorithm, self.comm)
        source.meet(learner)
        create = self.folder.create if self.folder else lambda: None
        self.comm.together(create)  # when nothing else can be wrong any more
        history: list[Progress] = []
        seconds = 0.0
        for epoch in range(self.epochs):
            begin = time.perf_counter()
            loss = self._train_epoch(source, epoch, learner)
            seconds += time.perf_counter() - begin
            history.append(self._progress(epoch + 1, loss, learner, seconds))
            if self.folder:
                self.folder.append_metrics(asdict(history[-1]))
            if self.comm.rank == 0:
                self.report(history[-1])
        learner.finish()
        if self.folder:
            self.folder.write_model(self.model.parameters)
        return history

    def _source(self) -> Source:
        return Source(
            self.train,
            minibatch_size=self.minibatch_size,
            epochs=self.epochs,
            seed=self.seed,
            dtype=self.model.parameters.dtype,
            classes=self.model.classes,
        )

    def _train_epoch(self, source: Source, epoch: int, learner: Learner) -> float:
        """Train on one epoch and return this rank's part of the summed loss."""
        total = 0.0
        for x, y in source.epoch(epoch, learner):
            loss = self.model.gradient(x, y, out=learner.gradient)
            if learner.distributed or self.comm.rank == 0:  # before that all have the same
                total += loss
            learner.step(samples=len(x))
        return total

    def _progress(self, epoch: int, loss: float, learner: Learner, seconds: float) -> Progress:
        learner.meet()
        shares = self.comm.allgather_object((loss, learner.bytes_sent))
        with learner.shared_model():
            test_loss, accuracy = self._evaluate()
        if not math.isfinite(test_loss):
            raise SharedError(
                f"training has diverged: the test loss is {test_loss} after {learner.samples} "
                "samples; a smaller learning rate may help"
            )
        return Progress(
            epoch=epoch,
            samples=learner.samples,
            train_loss=sum(loss for loss, _ in shares) / len(self.train),
            test_loss=test_loss,
            test_accuracy=accuracy,
            learning_rate=learner.local_step.lr,
            bytes_sent=sum(sent for _, sent in shares),
            seconds=round(seconds, 4),
        )

    def _evaluate(self) -> tuple[float, float]:
        """Mean loss and accuracy on the test data, of which every rank takes a part."""
        shares = self.comm.allgather_object(self.comm.together(self._evaluate_part))
        loss, correct = (sum(share) for share in zip(*shares, strict=True))
        return loss / len(self.test), correct / len(self.test)

    def _evaluate_part(self) -> tuple[float, float]:
        """Summed loss and number of right answers on this rank's part of the test data."""
        dtype, classes = self.model.parameters.dtype, self.model.classes
        part = np.arange(len(self.test))[self.comm.rank :: self.comm.size]
        loss = correct = 0.0
        for first in range(0, len(part), EVALUATED):
            indexes = part[first : first + EVALUATED]
            x, y = self.test.read(indexes, dtype=dtype, classes=classes)
            mean_loss, accuracy = self.model.evaluate(x, y)
            loss += mean_loss * len(indexes)
            correct += round(accuracy * len(indexes))
        return loss, correct
