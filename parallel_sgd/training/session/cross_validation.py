"""Options for measuring the model during training, and for ending training early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ...data import Dataset, Sequences, as_dataset
from ...errors import UserError
from ...validation import BOTH, choice, integer, number, set_validated, shown
from .state import Progress

HIGHER_IS_BETTER = ("f1", "r2")  #: and names that end in "accuracy"

Callback = Callable[[Progress], bool | None]
"""A function of a row of metrics, called with the same row on every training rank. Return False to
end training on all ranks."""


@dataclass(frozen=True, kw_only=True)
class CrossValidation:
    """Data to measure the common model on during training.

    Args:
        data: a data set readable by every rank, or an argument of `as_dataset`, or
            `data.Sequences`. Each rank measures a part.
        every: samples of all ranks between two measurements. None: an epoch.
        criterion: the metric that selects the best model: the lowest value is best.
        higher_is_better: the highest value is best. None: true for "r2", "f1", and names ending in
            "accuracy".
        patience: training ends after this many measurements without a new best model. None: never.
        min_improvement: least improvement of the criterion for a new best model.
        restore_best: end training with the best model instead of the last.
        name: prefix of the metrics: "validation" gives "validation_loss".
        batch: samples measured at a time on each rank.
    Raises:
        UserError: an argument is not as required.

    Local.
    """

    data: Any
    every: int | None = None
    criterion: str = "loss"
    higher_is_better: bool | None = None
    patience: int | None = None
    min_improvement: float = 0.0
    restore_best: bool = False
    name: str = "validation"
    batch: int = 1024

    def __post_init__(self) -> None:
        every = None if self.every is None else integer("every", self.every, 1)
        patience = None if self.patience is None else integer("patience", self.patience, 1)
        data = self.data if isinstance(self.data, Sequences) else as_dataset(self.data)
        if len(data) == 0:
            raise UserError(f"data of {self.name} must have at least one sample: {data!r} is empty")
        for name in ("criterion", "name"):
            text = getattr(self, name)
            if not isinstance(text, str) or not text:
                raise UserError(f"{name}={shown(text)} must be a text")
        higher = self.higher_is_better
        set_validated(
            self,
            data=data,
            higher_is_better=None if higher is None else choice("higher_is_better", higher, BOTH),
            restore_best=choice("restore_best", self.restore_best, BOTH),
            every=every,
            patience=patience,
            min_improvement=number("min_improvement", self.min_improvement, 0),
            batch=integer("batch", self.batch, 1),
        )

    @property
    def dataset(self) -> Dataset | Sequences:
        """The data. Local."""
        dataset: Dataset | Sequences = self.data
        return dataset

    @property
    def facts(self) -> dict[str, Any]:
        """All options except the data, which the ranks compare separately. Local."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}

    def value(self, progress: Progress) -> float | None:
        """Return a row's criterion, lower is better, or None if it was not measured. Local.

        Raises:
            UserError: there is no such metric.
        """
        before = f"{self.name}_"
        measured = {
            name: value for name, value in progress.metrics.items() if name.startswith(before)
        }
        if not measured:
            return None
        if before + self.criterion not in measured:
            names = ", ".join(sorted(name.removeprefix(before) for name in measured))
            raise UserError(f"criterion={self.criterion!r} must be one of the metrics: {names}")
        value = measured[before + self.criterion]
        higher = self.higher_is_better
        if higher is None:
            higher = self.criterion in HIGHER_IS_BETTER or self.criterion.endswith("accuracy")
        return -value if higher and value is not None else value
