"""The progress of training: rows of metrics, and the state of a session."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from ...communication.serialization import message
from ...validation import LARGEST_INTEGER


@message
@dataclass(frozen=True)
class Progress:
    """The progress of training: a line of metrics.jsonl.

    Rows of asynchronous workers are the first worker's: the loss of its own part of the data, the
    metrics of its latest pulled model, and its bytes sent and received since the program was
    started. The last row counts all workers' bytes, and its `details` cover all workers.

    Attributes:
        epoch: epochs seen; 2.5 is in the middle of the third.
        samples: samples of all ranks.
        train_loss: the mean over the minibatches since the previous row, each before its update.
            None without minibatches.
        learning_rate: learning rate of the next step. None if the optimizer has no rate.
        minibatch_size: size of the next minibatch, in samples of all ranks.
        bytes_sent: the sum over all ranks, with parameter servers in both directions, and between
            the ranks of a worker.
        seconds: training time without evaluation, on the slowest rank.
        metrics: values by the name of the data and of the metric: "test_loss". None if not finite.
        details: the algorithm's report on this rank (`Learner.report`).
        event: the action taken at this row, such as "rolled back to 5000 samples".
    """

    epoch: float
    samples: int
    train_loss: float | None
    learning_rate: float | None
    minibatch_size: int
    bytes_sent: int
    seconds: float
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    details: dict[str, Any] | None = None
    event: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Convert to a JSON object: metrics under their own names, fields with None omitted."""
        row = {name: value for name, value in asdict(self).items() if value is not None}
        row.pop("metrics")
        return row | dict(self.metrics)

    def finite(self) -> Progress:
        """Return this row with None in place of numbers that are not finite, for JSON. Local."""
        metrics = {name: _finite(value) for name, value in self.metrics.items()}
        return replace(self, train_loss=_finite(self.train_loss), metrics=metrics)

    def with_event(self, event: str) -> Progress:
        """Return this row with a further event. Local."""
        return replace(self, event=f"{self.event}; {event}" if self.event else event)


def loss_curves(
    history: Sequence[Progress], of: str = "", *, train: bool = True
) -> dict[str, list[tuple[int, float]]]:
    """Collect the points of every loss curve.

    Args:
        of: end of the names of all curves, except training's.
        train: include the training loss.
    Returns:
        For every name, its points (samples, loss).
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in history:
        losses = {"training": row.train_loss} if train else {}
        for name, value in row.metrics.items():
            if name.endswith("_loss"):
                losses[name.removesuffix("_loss") + of] = value
        for name, value in losses.items():
            if value is not None:
                curves.setdefault(name, []).append((row.samples, value))
    return curves


@message
@dataclass
class SessionState:
    """The state of a session between two minibatches: its part of a checkpoint.

    Attributes:
        history: the rows so far.
        loss: this rank's part of the summed loss since the latest row.
        count: samples in this sum.
        seconds: training time so far.
        factor: the factor on the learning rate, by `AutoLearningRate`.
        size: the minibatch size found by `AutoMinibatchSize`. 0: as the schedule says.
        best: the lowest criterion so far.
        best_samples: samples at the lowest criterion.
        latest: the criterion at the latest look of `AutoLearningRate`.
        looks: rows since that look.
        stale: rows since the best row.
        ended: the reason why training has ended, if a resumed run need not continue.
        total: the samples at which training was to end.
    """

    history: list[Progress] = field(default_factory=list)
    loss: float = 0.0
    count: int = 0
    seconds: float = 0.0
    factor: float = 1.0
    size: int = 0
    best: float | None = None
    best_samples: int = 0
    latest: float | None = None
    looks: int = 0
    stale: int = 0
    ended: str = ""
    total: int = 0

    def as_dict(self, *, history: bool = True) -> dict[str, Any]:
        """Convert to a JSON object.

        Args:
            history: whether to include the rows.
        """
        values = asdict(self) | {"loss": float(self.loss)}
        return values if history else {**values, "history": []}

    @classmethod
    def of(cls, extras: Sequence[Any], rank: int, size: int) -> Self | None:
        """Restore a session's state from a checkpoint.

        Args:
            extras: the `extra` of every writing rank.
            rank: this rank.
            size: the number of ranks that resume.
        Returns:
            This rank's state, or None if the checkpoint is not of a session.
        """
        if not all(_is_session_state(extra) for extra in extras):
            return None
        if not all(_is_row(row) for row in extras[0]["history"]):
            return None
        mine = extras[rank::size]
        sums = {name: sum(extra[name] for extra in mine) for name in ("loss", "count")}
        history = [Progress(**row) for row in extras[0]["history"]]
        return cls(**(extras[0] | sums | {"history": history}))

    def copy(self) -> Self:
        """Return a copy that later steps and rows do not change. Local."""
        return replace(self, history=[*self.history], loss=float(self.loss))

    def at_best(self) -> Self:
        """Return the state as of the row with the lowest criterion. Local."""
        history = [row for row in self.history if row.samples <= self.best_samples]
        return replace(self, history=history, loss=0.0, count=0)

    def begin_row(self) -> None:
        """Reset the loss sum for the next row."""
        self.loss, self.count = 0.0, 0


@message
@dataclass(frozen=True)
class RunState:
    """The state of a run between two minibatches: kept in memory with each snapshot of the learner,
    so that a recovery rolls both back together.

    Attributes:
        state: the session's state.
        criterion: of the present model, if known.
        ended: the reason why training ends early, or None.
        ends_with_best: the final model is the best model.
        trained: a step was taken in this run.
        begun: all work before the first minibatch is done.
        start: samples at the start of the session.
        generation: of the ranks, at the latest comparison of arguments.
        rank: this rank's number in the world at the start of the job.
    """

    state: SessionState
    criterion: float | None
    ended: str | None
    ends_with_best: bool
    trained: bool
    begun: bool
    start: int
    generation: int
    rank: int


MAY_BE_NONE = {"train_loss", "best", "latest", "learning_rate"}


def _is_session_state(extra: Any) -> bool:
    names = {field.name for field in fields(SessionState)}
    if not isinstance(extra, dict) or extra.keys() != names:
        return False
    texts = isinstance(extra["history"], list) and isinstance(extra["ended"], str)
    return texts and all(_is_number(extra[name], name) for name in names - {"history", "ended"})


def _is_row(row: Any) -> bool:
    """Return whether a value has the structure of a `Progress` as a dict."""
    names = {field.name for field in fields(Progress)}
    if not isinstance(row, dict) or row.keys() != names:
        return False
    metrics = row["metrics"]
    return (
        isinstance(row["details"], dict | None)
        and isinstance(row["event"], str | None)
        and isinstance(metrics, dict)
        and all(value is None or _is_number(value, name) for name, value in metrics.items())
        and all(_is_number(row[name], name) for name in names - {"details", "event", "metrics"})
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _is_number(value: Any, name: str) -> bool:
    if value is None:
        return name in MAY_BE_NONE
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return (is_integer and abs(value) <= LARGEST_INTEGER) or isinstance(value, float)
