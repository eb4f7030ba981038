"""What a session measures while it trains, and when that ends training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ...data import Dataset, Sequences, as_dataset
from ...errors import UserError
from ...validation import BOTH, choice, integer, number, set_validated, shown
from .state import Progress

HIGHER_IS_BETTER = ("f1", "r2")  #: and whatever ends in "accuracy"

Callback = Callable[[Progress], bool | None]
"""Called on every rank that trains with every row, the same on all; False ends training on all."""


@dataclass(frozen=True, kw_only=True)
class CrossValidation:
    """Data that a session measures the common model on, in the course of training.

    Args:
        data: a data set that every rank can read, or what makes one, or `data.Sequences`; each
            rank measures a part.
        every: so many samples of all ranks lie between two measurements; None: an epoch.
        criterion: the metric that says which model is the best: the lowest one.
        higher_is_better: the highest one is; None: that of "accuracy", "r2" and "f1" is.
        patience: training ends after so many measurements without a new best one; None: never.
        min_improvement: by how much, at least, a criterion must be better to be a new best one.
        restore_best: whether training ends with the best model, rather than the last.
        name: what metrics are called by: "validation" gives "validation_loss".
        batch: samples that a rank measures at a time.
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
        """All but the data, which ranks compare by themselves. Local."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}

    def value(self, progress: Progress) -> float | None:
        """A row's criterion, the lower the better; None where it was not measured. Local.

        Raises:
            UserError: there is no such metric.
        """
        before = f"{self.name}_"
        own = {name: value for name, value in progress.metrics.items() if name.startswith(before)}
        if not own:
            return None
        if before + self.criterion not in own:
            names = ", ".join(sorted(name.removeprefix(before) for name in own))
            raise UserError(f"criterion={self.criterion!r} must be one of the metrics: {names}")
        value = own[before + self.criterion]
        higher = self.higher_is_better
        if higher is None:
            higher = self.criterion in HIGHER_IS_BETTER or self.criterion.endswith("accuracy")
        return -value if higher and value is not None else value
