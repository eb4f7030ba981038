"""A training session: epochs, evaluation, progress on rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ..algorithms import Algorithm
from ..communication import Communicator
from ..data import Dataset, Source
from ..errors import SharedError, UserError
from ..models import Classifier
from ..optimizers import Optimizer
from .learner import Learner
from .run_folder import RunFolder


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
        folder: where rank 0 writes; None writes nothing.
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
            UserError: on all ranks, if the options disagree, data are bad on any rank, or a
                gradient is not finite.
        """
        source = Source(
            self.train,
            minibatch_size=self.minibatch_size,
            epochs=self.epochs,
            seed=self.seed,
            dtype=self.model.parameters.dtype,
            classes=self.model.classes,
        )
        learner = Learner(self.model.parameters, self.optimizer, self.algorithm, self.comm)
        history: list[Progress] = []
        seconds = 0.0
        for epoch in range(self.epochs):
            begin = time.perf_counter()
            loss = self._train_epoch(source, epoch, learner)
            seconds += time.perf_counter() - begin
            history.append(self._progress(epoch + 1, loss, learner, seconds))
            if self.comm.rank == 0:
                if self.folder:
                    self.folder.append_metrics(asdict(history[-1]))
                self.report(history[-1])
        learner.finish()
        if self.folder and self.comm.rank == 0:
            self.folder.write_model(self.model.parameters)
        return history

    def _train_epoch(self, source: Source, epoch: int, learner: Learner) -> float:
        """Train on one epoch and return the loss of this rank, summed over its samples."""
        loss = 0.0
        try:
            for x, y in source.epoch(epoch, learner):
                loss += self.model.gradient(x, y, out=learner.gradient)
                learner.step(samples=len(x))
        except SharedError:
            raise
        except UserError as error:
            learner.fail(str(error))
        return loss

    def _progress(self, epoch: int, loss: float, learner: Learner, seconds: float) -> Progress:
        shares = self.comm.allgather_object((loss, learner.bytes_sent))
        losses = [loss for loss, _ in shares] if learner.distributed else [loss]
        test_loss, accuracy = self._evaluate()
        return Progress(
            epoch=epoch,
            samples=learner.samples,
            train_loss=sum(losses) / len(self.train),
            test_loss=test_loss,
            test_accuracy=accuracy,
            learning_rate=learner.local_step.lr,
            bytes_sent=sum(sent for _, sent in shares),
            seconds=round(seconds, 4),
        )

    def _evaluate(self) -> tuple[float, float]:
        """Loss and accuracy on the test data: rank 0's, sent to all."""
        found = problem = None
        if self.comm.rank == 0:
            try:
                x, y = self.test.arrays(
                    dtype=self.model.parameters.dtype, classes=self.model.classes
                )
                found = self.model.evaluate(x, y)
            except UserError as error:
                problem = str(error)
        self.comm.raise_together(problem)
        result: tuple[float, float] = self.comm.allgather_object(found)[0]
        return result
