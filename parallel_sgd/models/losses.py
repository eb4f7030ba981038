"""Losses of the models: a loss over the outputs with its gradient, and a score for people."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..kernels import array_module
from ..validation import kind_of, shown

Array = Any  #: a NumPy or CuPy array
Sums = npt.NDArray[np.float64]


class Loss(ABC):
    """A loss with its gradient, and a score. Stateless; computes on the outputs' device.

    Attributes:
        labels: True if y is one label a sample, [m] integers below the number of outputs; False if
            y holds a number for each output.
        metric: the name of the score.
    """

    labels: bool = False
    metric: str

    @abstractmethod
    def checked(self, y: Array, outputs: int, first: int = 0) -> Array:
        """Check y, and bring y into the shape expected by the other methods.

        Args:
            y: [m, …], plain numbers, m at least 1.
            outputs: number of the model's outputs.
            first: the index of the first sample, for errors.
        Returns:
            [m] labels, or [m, outputs].
        Raises:
            UserError: shape, type or values of y are not as required.
        """

    @abstractmethod
    def loss_and_delta(self, outputs: Array, y: Array) -> tuple[float, Array]:
        """Return the summed loss, and its gradient by the outputs, written over the outputs.

        Args:
            outputs: [m, outputs]; overwritten.
            y: as returned by `checked`; of the outputs' dtype unless y holds labels.
        """

    @abstractmethod
    def sums(self, outputs: Array, y: Array) -> Sums:
        """Return the sums behind the score, float64 [k].

        Sums are additive: the sums of two sets of samples, added, are the sums of their union.
        Arguments as for `loss_and_delta`, but not changed.
        """

    @abstractmethod
    def score(self, sums: Sums, samples: int) -> float:
        """Return the score of so many samples, at least 1, given their added `sums`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class CrossEntropy(Loss):
    """Cross-entropy, for the label of one class a sample; the outputs are logits.

        loss = Σ_i log Σ_c exp(logits_ic) - logits_i,y_i        (in nats)

    The score is the accuracy: the fraction of samples whose largest logit is the label's.
    """

    labels = True
    metric = "accuracy"

    def checked(self, y: Array, outputs: int, first: int = 0) -> Array:
        if y.ndim != 1:
            raise UserError(f"y must have shape [m], a label for each x: it has {shape_of(y)}")
        if y.dtype.kind not in "iu":
            raise UserError(f"y must hold integer labels: it has dtype {y.dtype}")
        if y.min() < 0 or y.max() >= outputs:
            bad = int(((y < 0) | (y >= outputs)).argmax())
            raise UserError(
                f"y[{first + bad}] = {y[bad]} is out of range: labels must be from 0 to "
                f"{outputs - 1}"
            )
        return y

    def loss_and_delta(self, outputs: Array, y: Array) -> tuple[float, Array]:
        """Return the loss, and the gradient softmax - one-hot."""
        xp = array_module(outputs)
        rows = xp.arange(len(y))
        outputs -= outputs.max(axis=1, keepdims=True)
        chosen = outputs[rows, y]
        xp.exp(outputs, out=outputs)
        total = outputs.sum(axis=1)
        loss = (xp.log(total) - chosen).sum(dtype=np.float64)
        outputs /= total[:, None]
        outputs[rows, y] -= 1
        return float(loss), outputs

    def sums(self, outputs: Array, y: Array) -> Sums:
        """Return [number of correctly classified samples]."""
        return np.array([float((outputs.argmax(axis=1) == y).sum())])

    def score(self, sums: Sums, samples: int) -> float:
        return float(sums[0]) / samples


class SquaredError(Loss):
    """Squared error, for regression: y has a number for each output.

        loss = Σ_i Σ_k (outputs_ik - y_ik)²

    The score is R², 1 - Σ (outputs - y)² / Σ (y - mean of y)²: 1 for a perfect model, 0 for a model
    that always predicts the mean. For several outputs it is the mean of their R². If all y of an
    output are equal, R² is 1 for exact predictions and else 0. y is [m, outputs]; for a single
    output also [m].
    """

    metric = "r2"

    def checked(self, y: Array, outputs: int, first: int = 0) -> Array:
        return _for_each_output(y, outputs, "a number")

    def loss_and_delta(self, outputs: Array, y: Array) -> tuple[float, Array]:
        """Return the loss, and the gradient 2 (outputs - y)."""
        outputs -= y
        loss = (outputs * outputs).sum(dtype=np.float64)
        outputs *= 2
        return float(loss), outputs

    def sums(self, outputs: Array, y: Array) -> Sums:
        """Return the sums of squared errors, of y, and of y², for each output: [3 * outputs]."""
        y = y.astype(np.float64)
        errors = outputs - y
        return np.concatenate([_on_host((a).sum(axis=0)) for a in (errors * errors, y, y * y)])

    def score(self, sums: Sums, samples: int) -> float:
        squared_errors, y, squares = sums.reshape(3, -1)
        around_mean = squares - y * y / samples
        constant = around_mean <= samples * np.finfo(np.float64).eps * squares  # to rounding
        share = squared_errors / np.where(constant, 1, around_mean)
        return float(np.where(constant, squared_errors == 0, 1 - share).mean())


class BinaryCrossEntropy(Loss):
    """Binary cross-entropy, for any number of labels a sample: each output is the logit of a label.

        loss = Σ_i Σ_k log(1 + exp(outputs_ik)) - y_ik outputs_ik        (in nats)

    y is [m, outputs], 1 if the sample has the label, else 0; for a single output also [m]. The
    score is F1 over all labels together ("micro"): 2 hits / (true labels + predicted labels), where
    outputs above 0 predict a label; 0 if there are neither true nor predicted labels. Unlike
    accuracy, F1 does not reward a model that predicts no label at all when labels are rare.
    """

    metric = "f1"

    def checked(self, y: Array, outputs: int, first: int = 0) -> Array:
        y = _for_each_output(y, outputs, "0 or 1")
        wrong = (y != 0) & (y != 1)
        if wrong.any():
            i, k = divmod(int(wrong.argmax()), outputs)
            raise UserError(f"y[{first + i}][{k}] = {y[i, k]} must be 0 or 1")
        return y

    def loss_and_delta(self, outputs: Array, y: Array) -> tuple[float, Array]:
        """Return the loss, and the gradient sigmoid(outputs) - y."""
        xp = array_module(outputs)
        below = xp.exp(-xp.abs(outputs))  # at most 1, whatever the outputs are
        terms = xp.log1p(below) + xp.maximum(outputs, 0) - outputs * y
        loss = terms.sum(dtype=np.float64)
        outputs[...] = xp.where(outputs >= 0, 1, below) / (1 + below) - y
        return float(loss), outputs

    def sums(self, outputs: Array, y: Array) -> Sums:
        """Return [hits, true labels, predicted labels]."""
        there, guessed = y != 0, outputs > 0
        return np.array([float(a.sum()) for a in (there & guessed, there, guessed)])

    def score(self, sums: Sums, samples: int) -> float:
        hits, there, guessed = map(float, sums)
        return 2 * hits / max(there + guessed, 1.0)


#: Losses by name.
LOSSES: dict[str, Loss] = {
    "cross-entropy": CrossEntropy(),
    "squared": SquaredError(),
    "logistic": BinaryCrossEntropy(),
}

#: The loss for each of `data.TASKS`.
TASK_LOSSES = {
    "classification": "cross-entropy",
    "regression": "squared",
    "multi-label": "logistic",
}


def checked_loss(loss: str | Loss) -> Loss:
    """Return a loss, given as a `Loss` or by name.

    Raises:
        UserError: neither a `Loss` nor a name in `LOSSES`.
    """
    if isinstance(loss, Loss):
        return loss
    if not isinstance(loss, str) or loss not in LOSSES:
        names = ", ".join(map(repr, LOSSES))
        given = shown(loss) if isinstance(loss, str) else kind_of(loss)
        raise UserError(f"loss={given} must be one of {names}, or a Loss")
    return LOSSES[loss]


def shape_of(array: Array) -> str:
    """Format a minibatch's shape as "[m, 8, 8]", the same text on all ranks."""
    return f"[{', '.join(map(str, ('m', *array.shape[1:])))}]" if array.ndim else "[]"


def _for_each_output(y: Array, outputs: int, what: str) -> Array:
    """Return y as [m, outputs]; raise a UserError if the shape does not fit."""
    if y.ndim == 1 and outputs == 1:
        return y.reshape(-1, 1)
    if y.ndim != 2 or y.shape[1] != outputs:
        either = "[m] or [m, 1]" if outputs == 1 else f"[m, {outputs}]"
        raise UserError(f"y must have shape {either}, {what} for each output: it has {shape_of(y)}")
    return y


def _on_host(array: Array) -> Sums:
    return np.asarray(array.get() if hasattr(array, "get") else array, np.float64)
