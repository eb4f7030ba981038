"""The base class of the models: minibatches, the loss over the outputs, and evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import UserError
from ..kernels import array_module
from ..parameters import Parameters
from ..validation import NUMBERS, integer, kind_of
from .losses import Loss, Sums, shape_of

Array = Any  #: a NumPy or CuPy array
Ready = Callable[[str], object]


class Model(ABC):
    """A model whose outputs are trained by a loss, such as logits by cross-entropy.

    `parameters` belongs to the model and may be changed in place. NumPy or CuPy: the model computes
    on the device of its parameters, and moves minibatches there. Not thread-safe.
    """

    parameters: Parameters
    inputs: int
    outputs: int
    loss: Loss

    @property
    def classes(self) -> int | None:
        """Number of classes: labels in y are below this; None if y holds other numbers."""
        return self.outputs if self.loss.labels else None

    @abstractmethod
    def _forward(self, x: Array) -> Array:
        """Return the outputs [m, outputs] of x [m, inputs], in memory reused by the next call."""

    @abstractmethod
    def _backward(self, x: Array, delta: Array, out: Parameters, ready: Ready) -> None:
        """Write the gradient of all parameters, given the gradient of the outputs [m, outputs].

        Follows `_forward` of the same x; may change `delta`. Calls `ready` with the name of every
        parameter as soon as its gradient is complete, last layers first.
        """

    def gradient(
        self, x: Array, y: Array, out: Parameters, ready: Ready = lambda name: None
    ) -> float:
        """Write the gradient of the loss, summed over a minibatch, and return the summed loss.

        Args:
            x: [m, inputs]; converted to the parameters' dtype. Not changed.
            y: targets for the loss: [m], integers from 0 to classes - 1, for cross-entropy; [m,
                outputs] for other losses. Not changed.
            out: of the parameters' layout; every value is overwritten, with zeros if m is 0.
            ready: called with the name of each parameter when its gradient is in `out`, last layers
                first (not if m is 0): `Learner.ready`.
        Returns:
            The loss, 0.0 if m is 0. Non-finite values pass through, for the learner to handle.
        Raises:
            UserError: not arrays of numbers, shapes that do not fit, or targets that the loss
                refuses: labels that are not integers, or out of range.

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
            loss, delta = self.loss.loss_and_delta(self._forward(x), y)
            self._backward(x, delta, out, ready)
        return loss

    def predict(self, x: Array) -> Array:
        """Return the outputs [m, outputs] of x [m, inputs], m at least 1.

        The caller owns the returned array; it lies on the parameters' device.

        Raises:
            UserError: x holds no numbers, or its shape does not fit.

        Local.
        """
        xp, x = array_module(self.parameters.flat), as_numbers("x", x)
        with np.errstate(over="ignore", invalid="ignore"):
            return self._forward(self._checked(xp.asarray(x, self.parameters.dtype))).copy()

    def evaluate(self, x: Array, y: Array, batch: int = 1024) -> tuple[float, float]:
        """Return the mean loss and the score over samples.

        Args:
            x: [n, inputs], n at least 1; may be memory-mapped.
            y: targets [n, …], as for `gradient`.
            batch: samples at a time, at least 1; bounds the memory.
        Returns:
            The loss, and the score named by `loss.metric`: accuracy (a fraction) for cross-entropy,
            R² for squared errors, F1 for several labels.
        Raises:
            UserError: no samples, or as for `gradient`.

        Local.
        """
        return self.scores(self.evaluate_sums(x, y, batch), len(x))

    def evaluate_sums(self, x: Array, y: Array, batch: int = 1024) -> Sums:
        """Return the sums from which `scores` computes the loss and the score: float64 [k].

        Sums are additive: the sums of the parts of a data set (of several ranks, say), added, are
        the sums of the whole. Arguments and errors as for `evaluate`. Local.
        """
        batch = integer("batch", batch, 1)
        x, y = as_numbers("x", x), as_numbers("y", y, several=False)
        if y.ndim == 0:
            self.loss.checked(y, self.outputs)
        if len(x) == 0:
            raise UserError("evaluate needs at least one sample: x is empty")
        if len(x) != len(y):
            raise UserError(f"x and y must have equal lengths: {len(x)} and {len(y)}")
        sums: Any = 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            for begin in range(0, len(x), batch):
                part = slice(begin, begin + batch)
                some_x, some_y = self._moved(x[part], y[part], begin)
                outputs = self._forward(some_x)
                scored = self.loss.sums(outputs, some_y)
                loss, _ = self.loss.loss_and_delta(outputs, some_y)
                sums = sums + np.concatenate([[loss], scored])
        total: Sums = sums
        return total

    def scores(self, sums: Sums, samples: int) -> tuple[float, float]:
        """Return the mean loss and the score, given the `evaluate_sums` of all samples. Local."""
        samples = integer("samples", samples, 1)
        return float(sums[0]) / samples, self.loss.score(sums[1:], samples)

    def _moved(self, x: Array, y: Array, first: int = 0) -> tuple[Array, Array]:
        """Check a minibatch, and move x and y to the parameters' device.

        Args:
            first: index of the first sample, for errors.
        """
        xp = array_module(self.parameters.flat)
        x = self._checked(xp.asarray(x, dtype=self.parameters.dtype))
        if y.ndim and len(x) != len(y):
            raise UserError(f"x and y must have equal lengths: {len(x)} and {len(y)}")
        y = self.loss.checked(y, self.outputs, first)
        return x, xp.asarray(y, dtype=None if self.loss.labels else self.parameters.dtype)

    def _checked(self, x: Array) -> Array:
        if x.ndim != 2 or x.shape[1] != self.inputs:
            raise UserError(f"x must have shape [m, {self.inputs}]: it has {shape_of(x)}")
        return x


def as_numbers(name: str, values: Any, *, several: bool = True) -> Array:
    """Convert a user's values to an array; NumPy and CuPy arrays are returned as given.

    Args:
        several: True refuses a single number.
    Raises:
        UserError: `values` holds masked values, no plain numbers, or a single number if refused.
    """
    try:
        array = values if hasattr(values, "dtype") else np.asarray(values)
    except (TypeError, ValueError):
        raise UserError(f"{name} must be an array of numbers: it is {kind_of(values)}") from None
    if getattr(array.dtype, "kind", "") not in NUMBERS or (several and array.ndim == 0):
        kind = shape_of(array) if array.ndim == 0 else f"an array of {array.dtype}"
        raise UserError(f"{name} must be an array of numbers: it is {kind}")
    if isinstance(array, np.ma.MaskedArray):
        if np.ma.getmaskarray(array).any():  # training would use the numbers under the mask
            raise UserError(
                f"{name} must have no masked values: fill them, or remove their samples"
            )
        return array.data
    return array
