"""What a model is to learn of y: a loss over its outputs, and a score that people read."""

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
    """A loss with its gradient, and a score. Stateless; works where the outputs are.

    Attributes:
        labels: whether y is one label a sample, [m] integers below the number of outputs; else it
            holds a number for each output.
        metric: the name of the score.
    """

    labels: bool = False
    metric: str

    @abstractmethod
    def checked(self, y: Array, outputs: int, first: int = 0) -> Array:
        """See that y fits, and bring it into the shape that the other methods take.

        Args:
            y: [m, …], plain numbers, m at least 1.
            outputs: of the model.
            first: the index of the first sample, for errors.
        Raises:
            UserError: its shape, type or values are not as required.
        """

    @abstractmethod
    def loss_and_delta(self, outputs: Array, y: Array) -> tuple[float, Array]:
        """Return the summed loss and, in the outputs' place, its gradient.

        Args:
            outputs: [m, outputs]; overwritten.
            y: as `checked` returns it; of the outputs' dtype where it holds no labels.
        """

    @abstractmethod
    def sums(self, outputs: Array, y: Array) -> Sums:
        """What the score is made of, float64 [k]: the sums of two sets of samples, added, are those
        of both. Arguments as for `loss_and_delta`, but unchanged."""

    @abstractmethod
    def score(self, sums: Sums, samples: int) -> float:
        """The score of so many samples, at least 1, whose `sums` have been added."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class CrossEntropy(Loss):
    """For the label of one class a sample; the outputs are logits.

        loss = Σ_i log Σ_c exp(logits_ic) - logits_i,y_i        (in nats)

    The score is the accuracy, the fraction of samples whose largest logit is that of their label.
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
        """The gradient is softmax - one-hot."""
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
        """[samples whose label is guessed]."""
        return np.array([float((outputs.argmax(axis=1) == y).sum())])

    def score(self, sums: Sums, samples: int) -> float:
        return float(sums[0]) / samples


class SquaredError(Loss):
    """For numbers, one for each output: regression.

        loss = Σ_i Σ_k (outputs_ik - y_ik)²

    The score is R², 1 - Σ (outputs - y)² / Σ (y - mean of y)²: 1 for a perfect model, 0 for one
    that says the mean. Of several outputs it is the mean of theirs. Where all y are alike, it is 1
    if they are met and else 0. y is [m, outputs], of one output also [m].
    """

    metric = "r2"

    def checked(self, y: Array, outputs: int, first: int = 0) -> Array:
        return _for_each_output(y, outputs, "a number")

    def loss_and_delta(self, outputs: Array, y: Array) -> tuple[float, Array]:
        """The gradient is 2 (outputs - y)."""
        outputs -= y
        loss = (outputs * outputs).sum(dtype=np.float64)
        outputs *= 2
        return float(loss), outputs

    def sums(self, outputs: Array, y: Array) -> Sums:
        """Of each output: the squared errors, y, and y²."""
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
    """For any number of labels a sample: each output is the logit of one label by itself.

        loss = Σ_i Σ_k log(1 + exp(outputs_ik)) - y_ik outputs_ik        (in nats)

    y is [m, outputs], 1 where a sample has the label and else 0; of one output also [m]. The score
    is F1 over all labels together ("micro"): 2 hits / (labels there + labels guessed), of outputs
    above 0; 0 where there are none and none is guessed. To say no to all is not rewarded, as it
    would be by the share of right answers where labels are few.
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
        """The gradient is sigmoid(outputs) - y."""
        xp = array_module(outputs)
        below = xp.exp(-xp.abs(outputs))  # at most 1, whatever the outputs are
        terms = xp.log1p(below) + xp.maximum(outputs, 0) - outputs * y
        loss = terms.sum(dtype=np.float64)
        outputs[...] = xp.where(outputs >= 0, 1, below) / (1 + below) - y
        return float(loss), outputs

    def sums(self, outputs: Array, y: Array) -> Sums:
        """[hits, labels there, labels guessed]."""
        there, guessed = y != 0, outputs > 0
        return np.array([float(a.sum()) for a in (there & guessed, there, guessed)])

    def score(self, sums: Sums, samples: int) -> float:
        hits, there, guessed = map(float, sums)
        return 2 * hits / max(there + guessed, 1.0)


#: What models call them.
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
    """Return a loss, given or named.

    Raises:
        UserError: it is none.
    """
    if isinstance(loss, Loss):
        return loss
    if not isinstance(loss, str) or loss not in LOSSES:
        names = ", ".join(map(repr, LOSSES))
        given = shown(loss) if isinstance(loss, str) else kind_of(loss)
        raise UserError(f"loss={given} must be one of {names}, or a Loss")
    return LOSSES[loss]


def shape_of(array: Array) -> str:
    """A minibatch's shape in words that are the same on all ranks, whatever their shares of it."""
    return f"[{', '.join(map(str, ('m', *array.shape[1:])))}]" if array.ndim else "[]"


def _for_each_output(y: Array, outputs: int, what: str) -> Array:
    """y as [m, outputs]."""
    if y.ndim == 1 and outputs == 1:
        return y.reshape(-1, 1)
    if y.ndim != 2 or y.shape[1] != outputs:
        either = "[m] or [m, 1]" if outputs == 1 else f"[m, {outputs}]"
        raise UserError(f"y must have shape {either}, {what} for each output: it has {shape_of(y)}")
    return y


def _on_host(array: Array) -> Sums:
    return np.asarray(array.get() if hasattr(array, "get") else array, np.float64)
