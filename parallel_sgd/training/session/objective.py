"""The objective of a session: gradients of minibatches, and metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...data import Padded
from ...errors import UserError
from ...models import Model
from ...parameters import Parameters
from ...validation import function, instance, kind_of, line_of, mapping
from ..learner import Learner
from .batches import Batch, samples_in

Metric = Callable[[Any, Any], Any]
"""A function of a model's outputs for some samples and their targets; returns the mean over the
samples."""

OVERRIDE = "define samples_of in your Objective, which returns the number of samples"


class Objective(ABC):
    """A model with its loss for training and its metrics for evaluation.

    Your own class defines `backward` and `evaluate`. It also defines `sums` and `scores` if a
    metric is not a mean over samples, and `samples_of` if samples are not the first axis of a
    batch.

    Attributes:
        dtype: dtype of the inputs, requested from data sets.
        classes: labels must be below this number. None: there are no labels.
    """

    dtype: Any = np.float32
    classes: int | None = None

    @abstractmethod
    def backward(self, learner: Learner, pieces: Sequence[Batch]) -> Any:
        """Compute the gradient of this rank's part of a minibatch, for the learner's next step.

        Args:
            pieces: the pieces of this part, at least one, each of the largest size to compute at
                once.
        Returns:
            The loss, summed over the samples: a number, or an argument of `float`.

        Local.
        """

    @abstractmethod
    def evaluate(self, batch: Batch) -> Mapping[str, float]:
        """Return the mean of the loss and of every metric over at least one sample, by name.

        The loss is named "loss". Local.
        """

    def samples_of(self, batch: Batch) -> int:
        """Count the samples of a minibatch of this rank.

        Of `Padded` inputs the tokens are counted, or else the length of the first axis common to
        all arrays.

        Raises:
            UserError: the arrays have no common length.

        Local.
        """
        if isinstance(batch[0], Padded):
            return batch[0].tokens
        return samples_in(batch, instead=OVERRIDE)

    def sums(self, batch: Batch) -> Mapping[str, Any]:
        """Return the sums from which `scores` computes the metrics: numbers or arrays, by name.

        The sums of a data set are the added sums of its parts. Local.
        """
        means = numbers_of("evaluate", self.evaluate(batch))
        if "loss" not in means:
            raise UserError(
                f"evaluate must return 'loss' among its metrics: it returned {[*means]}"
            )
        samples = self.samples_of(batch)
        return {name: mean * samples for name, mean in means.items()}

    def scores(self, sums: Mapping[str, Any], samples: int) -> dict[str, float]:
        """Compute the loss and every metric from the `sums` of this many samples. Local."""
        return {name: float(total) / samples for name, total in sums.items()}


class ModelObjective(Objective):
    """The objective of a NumPy or CuPy model, which has its own loss and score.

    Args:
        model: a model of `parallel_sgd.models`, or with the same methods.
        metrics: further metrics, by name. Each is a function of outputs [m, outputs] and targets
            [m, …], and costs another forward pass.
    """

    def __init__(self, model: Model, metrics: Mapping[str, Metric] | None = None) -> None:
        instance("model", model, Model, "models.SoftmaxRegression(4, 3)")
        self.model, self.metrics = model, checked_metrics(metrics)
        self.dtype, self.classes = model.parameters.dtype, model.classes
        self._piece: Parameters | None = None  #: the gradient of one piece

    def backward(self, learner: Learner, pieces: Sequence[Batch]) -> float:
        first, *more = pieces
        x, y = first
        if not more:
            return self.model.gradient(x, y, out=learner.gradient, ready=learner.ready)
        loss = self.model.gradient(x, y, out=learner.gradient)
        if self._piece is None:
            self._piece = learner.gradient.like()
        for x, y in more:
            loss += self.model.gradient(x, y, out=self._piece)
            learner.gradient.flat[...] += self._piece.flat
        return loss

    def evaluate(self, batch: Batch) -> dict[str, float]:
        return self.scores(self.sums(batch), len(batch[0]))

    def sums(self, batch: Batch) -> dict[str, Any]:
        x, y = batch
        sums: dict[str, Any] = {SCORE: self.model.evaluate_sums(x, y)}
        if self.metrics:
            means = measured(self.metrics, self.model.predict(x), y)
            sums |= {name: mean * len(x) for name, mean in means.items()}
        return sums

    def scores(self, sums: Mapping[str, Any], samples: int) -> dict[str, float]:
        loss, score = self.model.scores(sums[SCORE], samples)
        means = {name: total / samples for name, total in sums.items() if name != SCORE}
        return {"loss": loss, self.model.loss.metric: score, **means}


SCORE = "loss and score"


def numbers_of(function: str, values: Any) -> dict[str, float]:
    """Convert the means returned by a user's function for a batch to floats. Local.

    Raises:
        UserError: the result is not a mapping from names to numbers.
    """
    if not isinstance(values, Mapping):
        raise UserError(
            f"{function} must return a mapping from the names of metrics to numbers, such as "
            f"{{'loss': loss}}: it returned {kind_of(values)}"
        )
    numbers = {}
    for name, value in values.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(
                f"{function} returned {kind_of(value)} for {name!r}, which must be one number: its "
                "mean over the batch's samples"
            ) from None
    return numbers


def checked_metrics(metrics: Any) -> dict[str, Metric]:
    """Return metrics as a dict. Local.

    Raises:
        UserError: not a mapping from names to functions.
    """
    what = "of outputs and targets"
    checked = mapping("metrics", metrics, f"functions {what}")
    return {name: function(f"metrics[{name!r}]", value, what) for name, value in checked.items()}


def measured(metrics: Mapping[str, Metric], outputs: Any, targets: Any) -> dict[str, float]:
    """Compute the value of every metric. Local.

    Raises:
        UserError: a metric fails, or returns no number.
    """
    values = {}
    for name, metric in metrics.items():
        try:
            values[name] = float(metric(outputs, targets))
        except Exception as error:
            kind = type(error).__name__
            raise UserError(f"metric {name!r} failed: {kind}: {line_of(error)}") from error
    return values


def objective_of(given: Any, metrics: Mapping[str, Metric] | None = None) -> Objective:
    """Return a model as an objective, or an objective unchanged. Local.

    Raises:
        UserError: it is neither.
    """
    if isinstance(given, Model):
        return ModelObjective(given, metrics)
    if isinstance(given, Objective):
        return given
    raise UserError(
        "objective must be a model of parallel_sgd.models, psgd.torch.Objective(model, loss), or "
        f"an Objective of your own: it is {kind_of(given)}"
    )
