"""What the models have in common: labels, the loss over them, and evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import UserError
from ..kernels import array_module
from ..parameters import Parameters
from ..validation import NUMBERS, integer, kind_of

Array = Any  #: a NumPy or CuPy array
Ready = Callable[[str], object]


class Classifier(ABC):
    """A model that gives every class a logit, and learns by cross-entropy.

    `parameters` belongs to the model and may be changed in place. NumPy or CuPy: the model works
    where its parameters are, and moves minibatches there. A model is not for several threads.
    """

    parameters: Parameters
    inputs: int
    classes: int

    @abstractmethod
    def _forward(self, x: Array) -> Array:
        """Return the logits [m, classes] of x [m, inputs], in memory that the next call reuses."""

    @abstractmethod
    def _backward(self, x: Array, delta: Array, out: Parameters, ready: Ready) -> None:
        """Write the gradient of all parameters, given that of the logits [m, classes].

        Follows `_forward` of the same x; may change `delta`. Calls `ready` with the name of every
        parameter as soon as its gradient is complete, last ones first.
        """

    def gradient(
        self, x: Array, y: Array, out: Parameters, ready: Ready = lambda name: None
    ) -> float:
        """Write the gradient of the loss, summed over a minibatch, and return the summed loss.

            loss = Σ_i log Σ_c exp(logits_ic) - logits_i,y_i        (in nats)

        Args:
            x: [m, inputs]; converted to the parameters' dtype.
            y: [m], integers from 0 to classes - 1.
            out: of the parameters' layout; every value is overwritten, with zeros where m is 0.
            ready: called with the name of each parameter when its gradient is in `out`, last ones
                first (not where m is 0): `Learner.ready`.
        Returns:
            The loss, 0.0 where m is 0. Non-finite values pass through, for the learner to judge.
        Raises:
            UserError: no arrays of numbers, shapes that do not fit, or y are no labels of this
                model: not integers, or out of range.

        Local. Reuses its memory while m does not grow.
        """
        if not isinstance(out, Parameters):
            raise UserError(f"out must be Parameters like the model's: it is {kind_of(out)}")
        x, y = as_numbers("x", x), as_numbers("y", y, several=False)
        if out.flat.shape != self.parameters.flat.shape:
            raise UserError(
                f"out must have the model's {self.parameters.flat.size} values: {out.flat.size}"
            )
        if len(x) == 0:
            out.flat[...] = 0
            return 0.0
        x, y = self._moved(x, y)
        with np.errstate(over="ignore", invalid="ignore"):
            loss, delta = self._loss_and_delta(self._forward(x), y)
            self._backward(x, delta, out, ready)
        return loss

    def evaluate(self, x: Array, y: Array, batch: int = 1024) -> tuple[float, float]:
        """Return the mean loss (in nats) and the accuracy (a fraction) over samples.

        Args:
            x: [n, inputs], n at least 1; may be memory-mapped.
            y: [n], integers from 0 to classes - 1.
            batch: samples at a time, at least 1; bounds the memory.
        Raises:
            UserError: no samples, shapes that do not fit, or y are no labels of this model.

        Local.
        """
        batch = integer("batch", batch, 1)
        x, y = as_numbers("x", x), as_numbers("y", y, several=False)
        if y.ndim == 0:
            raise UserError(f"y must have shape [m], a label for each x: it has {shape_of(y)}")
        if len(x) == 0:
            raise UserError("evaluate needs at least one sample: x is empty")
        if len(x) != len(y):
            raise UserError(f"x and y must have one length: {len(x)} and {len(y)}")
        loss, correct = 0.0, 0
        with np.errstate(over="ignore", invalid="ignore"):
            for begin in range(0, len(x), batch):
                part = slice(begin, begin + batch)
                some_x, some_y = self._moved(x[part], y[part], begin)
                logits = self._forward(some_x)
                correct += int((logits.argmax(axis=1) == some_y).sum())
                loss += self._loss_and_delta(logits, some_y)[0]
        return loss / len(x), correct / len(x)

    def _moved(self, x: Array, y: Array, first: int = 0) -> tuple[Array, Array]:
        """Bring a minibatch to where the parameters are; `first` is its first sample's index."""
        xp = array_module(self.parameters.flat)
        x = xp.asarray(x, dtype=self.parameters.dtype)
        if x.ndim != 2 or x.shape[1] != self.inputs:
            raise UserError(f"x must have shape [m, {self.inputs}]: it has {shape_of(x)}")
        if y.ndim != 1:
            raise UserError(f"y must have shape [m], a label for each x: it has {shape_of(y)}")
        if len(x) != len(y):
            raise UserError(f"x and y must have one length: {len(x)} and {len(y)}")
        if y.dtype.kind not in "iu":
            raise UserError(f"y must hold integer labels: it has dtype {y.dtype}")
        if y.min() < 0 or y.max() >= self.classes:
            bad = int(((y < 0) | (y >= self.classes)).argmax())
            raise UserError(
                f"y[{first + bad}] = {y[bad]} is out of range: labels must be from 0 to "
                f"{self.classes - 1}"
            )
        return x, xp.asarray(y)

    def _loss_and_delta(self, logits: Array, y: Array) -> tuple[float, Array]:
        """Return the summed loss and, in the logits' place, its gradient: softmax - one-hot."""
        xp = array_module(logits)
        rows = xp.arange(len(y))
        logits -= logits.max(axis=1, keepdims=True)
        chosen = logits[rows, y]
        xp.exp(logits, out=logits)
        total = logits.sum(axis=1)
        loss = (xp.log(total) - chosen).sum(dtype=np.float64)
        logits /= total[:, None]
        logits[rows, y] -= 1
        return float(loss), logits


def as_numbers(name: str, values: Any, *, several: bool = True) -> Array:
    """Take what a user has as an array, NumPy's or CuPy's as it is.

    Args:
        several: whether to refuse a single number.
    Raises:
        UserError: it holds no plain numbers, or is a single one where it may not be.
    """
    try:
        array = values if hasattr(values, "dtype") else np.asarray(values)
    except (TypeError, ValueError):
        raise UserError(f"{name} must be an array of numbers: it is {kind_of(values)}") from None
    if getattr(array.dtype, "kind", "") not in NUMBERS or (several and array.ndim == 0):
        kind = shape_of(array) if array.ndim == 0 else f"an array of {array.dtype}"
        raise UserError(f"{name} must be an array of numbers: it is {kind}")
    return array


def shape_of(array: Array) -> str:
    """A minibatch's shape in words that are the same on all ranks, whatever their shares of it."""
    return f"[{', '.join(map(str, ('m', *array.shape[1:])))}]" if array.ndim else "[]"
