"""How far training has come: measured by all ranks together, or by the first one alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from ..communication import Communicator
from ..data import Dataset
from ..errors import SharedError
from ..models import Classifier
from .learner import Learner

EVALUATED = 4096  #: samples that are read at a time to evaluate


@dataclass(frozen=True)
class Progress:
    """Where training stands after an epoch; a line of metrics.jsonl.

    Losses are mean cross-entropies in nats; `train_loss` is the mean over the epoch's minibatches,
    each before its own update. `bytes_sent` is the sum over all ranks, with parameter servers of
    both ways; `seconds` counts training without evaluation; `details` is what the algorithm has to
    tell (`Algorithm.report`).

    Where workers train asynchronously, the rows are the first worker's: the loss of its own part of
    the data, the test loss of the model that it has just pulled, the bytes that went to it and from
    it since the program was started; the last row counts all workers' bytes, and its `details` are
    of all.
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

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it, without details where there are none."""
        return {name: value for name, value in asdict(self).items() if value is not None}


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

    @classmethod
    def of(cls, extras: Sequence[Any], rank: int, size: int) -> Standing | None:
        """That of one of `size` ranks, who go on from what these have kept in a checkpoint; None
        where that is of no session."""
        counts = ("loss", "count", "seconds")
        for extra in extras:
            if not isinstance(extra, dict) or not isinstance(extra.get("history"), list):
                return None
            if not all(_is_number(extra.get(name)) for name in counts):
                return None
        if not all(_is_row(row) for row in extras[0]["history"]):
            return None
        mine = extras[rank::size]
        loss, count = (sum(extra[name] for extra in mine) for name in ("loss", "count"))
        history = [Progress(**row) for row in extras[0]["history"]]
        return cls(history, loss, count, extras[0]["seconds"])


def _is_row(row: Any) -> bool:
    """Whether it is what `asdict` makes of a `Progress`."""
    if not isinstance(row, dict) or not isinstance(row.get("details"), dict | None):
        return False
    names = {field.name for field in fields(Progress)}
    return row.keys() == names and all(_is_number(row[name]) for name in names - {"details"})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Observer:
    """Measures the progress of a learner.

    Args:
        learner: of ranks that train. Where they train asynchronously, only the first of them
            is observed, and nobody waits for it.
        model: the learner's.
        test: the data that it is measured on.
    """

    def __init__(self, learner: Learner, model: Classifier, test: Dataset) -> None:
        self.learner, self.model, self.test = learner, model, test
        self.asynchronous = learner.algorithm.asynchronous
        self.comm = Communicator.single() if self.asynchronous else learner.comm
        self.observes = not self.asynchronous or learner.comm.rank == 0  #: this rank

    def progress(self, epoch: int, standing: Standing) -> Progress:
        """The row after an epoch. Collective, unless training is asynchronous.

        Raises:
            SharedError: training has diverged; on all workers, also asynchronous ones.
        """
        learner = self.learner
        if not self.asynchronous:
            learner.meet()
        losses = self.comm.allgather_object((standing.loss, standing.count))
        loss, count = (sum(column) for column in zip(*losses, strict=True))
        loss /= max(count, 1)
        self._require_finite("train", loss)
        return Progress(
            epoch=epoch,
            samples=learner.samples,
            train_loss=loss,
            learning_rate=learner.local_step.lr,
            seconds=round(standing.seconds, 4),
            **self.measured(),
        )

    def measured(self) -> dict[str, Any]:
        """What can be measured at any time, of the model that all ranks have in common.

        Collective, and raises, as `progress`.
        """
        learner = self.learner
        with learner.shared_model():
            loss, accuracy = self._evaluate()
        self._require_finite("test", loss)
        details = learner.report()
        if self.asynchronous:  # what is known here
            workers = (details or {}).get("workers", [])
            sent = sum(worker["bytes_sent"] + worker["bytes_received"] for worker in workers)
        else:
            sent = sum(self.comm.allgather_object(learner.bytes_sent))
        return {
            "test_loss": loss,
            "test_accuracy": accuracy,
            "bytes_sent": sent,
            "details": details,
        }

    def _require_finite(self, name: str, loss: float) -> None:
        if math.isfinite(loss):
            return
        problem = (
            f"training has diverged: the {name} loss is {loss} after {self.learner.samples} "
            "samples; a smaller learning rate may help"
        )
        if self.asynchronous:
            self.learner.fail(problem)
        raise SharedError(problem)

    def _evaluate(self) -> tuple[float, float]:
        """Mean loss and accuracy on the test data, of which every rank takes a part."""
        sums = self.comm.allgather_object(self.comm.together(self._evaluate_part))
        loss, correct = (sum(column) for column in zip(*sums, strict=True))
        return loss / len(self.test), correct / len(self.test)

    def _evaluate_part(self) -> tuple[float, float]:
        """Summed loss and number of right answers on this rank's part of the test data."""
        dtype, classes = self.model.parameters.dtype, self.model.classes
        own = np.arange(len(self.test))[self.comm.rank :: self.comm.size]
        loss = correct = 0.0
        for first in range(0, len(own), EVALUATED):
            indexes = own[first : first + EVALUATED]
            x, y = self.test.read(indexes, dtype=dtype, classes=classes)
            mean_loss, accuracy = self.model.evaluate(x, y)
            loss += mean_loss * len(indexes)
            correct += round(accuracy * len(indexes))
        return loss, correct
