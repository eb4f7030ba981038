"""How far training has come: rows of metrics, and where a session stands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from ...validation import LARGEST_INTEGER


@dataclass(frozen=True)
class Progress:
    """Where training stands: a line of metrics.jsonl.

    Attributes:
        epoch: epochs that have been seen; 2.5 is in the midst of the third.
        samples: of all ranks.
        train_loss: the mean over the minibatches since the row before, each before its own update;
            None where there were none.
        learning_rate: of the next step; None where the optimizer has none.
        minibatch_size: of the next minibatch, in samples of all ranks.
        bytes_sent: the sum over all ranks, with parameter servers of both ways.
        seconds: of training, without evaluation, on the rank that took longest.
        metrics: what was measured, by the name of the data and its own: "test_loss"; None where
            that was no finite number.
        details: what the algorithm has to tell of this rank (`Learner.report`).
        event: what was done about it: "rolled back to 5000 samples", say.

    Where workers train asynchronously, the rows are the first worker's: the loss of its own part of
    the data, the metrics of the model that it has just pulled, the bytes that went to it and from
    it since the program was started; the last row counts all workers' bytes, and its `details` are
    of all.
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
        """As JSON can hold it: metrics under their own names, and nothing that is None."""
        row = {name: value for name, value in asdict(self).items() if value is not None}
        row.pop("metrics")
        return row | dict(self.metrics)

    def finite(self) -> Progress:
        """This row with None in place of what is not finite, as JSON can hold it. Local."""
        metrics = {name: _finite(value) for name, value in self.metrics.items()}
        return replace(self, train_loss=_finite(self.train_loss), metrics=metrics)

    def with_event(self, event: str) -> Progress:
        """This row, saying what was done about it, too. Local."""
        return replace(self, event=f"{self.event}; {event}" if self.event else event)


def loss_curves(
    history: Sequence[Progress], of: str = "", *, train: bool = True
) -> dict[str, list[tuple[int, float]]]:
    """The points of every loss, by a name that ends in `of`; those of training without it."""
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


@dataclass
class SessionState:
    """Where a session stands between two minibatches: its part of a checkpoint.

    Attributes:
        history: the rows so far.
        loss: this rank's part of the summed loss since the latest row.
        count: samples in it.
        seconds: of training so far.
        factor: on the learning rate, by `AutoLearningRate`.
        size: of a minibatch, by `AutoMinibatchSize`; 0: as the schedule says.
        best: the lowest criterion so far, and after how many samples it was.
        latest: the criterion at the latest look of `AutoLearningRate`.
        looks: rows since then.
        stale: rows since the best one.
        ended: why training has ended, where it need not go on when it is resumed.
        total: samples at which it was to end then.
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
        """As JSON can hold it.

        Args:
            history: whether with the rows.
        """
        kept = asdict(self) | {"loss": float(self.loss)}
        return kept if history else {**kept, "history": []}

    @classmethod
    def of(cls, extras: Sequence[Any], rank: int, size: int) -> Self | None:
        """That of one of `size` ranks, who go on from what these have kept in a checkpoint; None
        where that is of no session."""
        if not all(_is_session_state(extra) for extra in extras):
            return None
        if not all(_is_row(row) for row in extras[0]["history"]):
            return None
        mine = extras[rank::size]
        sums = {name: sum(extra[name] for extra in mine) for name in ("loss", "count")}
        history = [Progress(**row) for row in extras[0]["history"]]
        return cls(**(extras[0] | sums | {"history": history}))

    def begin_row(self) -> None:
        """Forget what the latest row has told."""
        self.loss, self.count = 0.0, 0


MAY_BE_NONE = {"train_loss", "best", "latest", "learning_rate"}


def _is_session_state(extra: Any) -> bool:
    names = {field.name for field in fields(SessionState)}
    if not isinstance(extra, dict) or extra.keys() != names:
        return False
    texts = isinstance(extra["history"], list) and isinstance(extra["ended"], str)
    return texts and all(_is_number(extra[name], name) for name in names - {"history", "ended"})


def _is_row(row: Any) -> bool:
    """Whether it is what `asdict` makes of a `Progress`."""
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
    whole = isinstance(value, int) and not isinstance(value, bool)
    return (whole and abs(value) <= LARGEST_INTEGER) or isinstance(value, float)
