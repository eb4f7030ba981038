"""A multilayer perceptron, and softmax regression: a perceptron without hidden layers."""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..kernels import array_module
from ..parameters import Parameters
from ..validation import checked_seed, choice, integer, line_of, require_memory, shown
from .losses import Loss, checked_loss
from .model import Array, Model, Ready


class MLP(Model):
    """Affine layers with rectifiers between them; without hidden layers a linear model.

        a_0 = x,    a_l = max(a_{l-1} W_l + b_l, 0),    outputs = a_{L-1} W_L + b_L

    Args:
        sizes: inputs, the width of each hidden layer, outputs; at least two numbers.
        loss: "cross-entropy" for the label of one class a sample, with logits as outputs; "squared"
            for regression; "logistic" for several labels a sample, with a logit for each label as
            outputs; or a `Loss`.
        seed: an integer of at least 0. Decides the initial weights, normal with variance 2/fan-in
            (1/fan-in in the last layer; biases 0), the same on NumPy and CuPy.
        dtype: float32 or float64; the same initial values, to rounding.
        device: "cpu" for NumPy, "cuda" for CuPy on its current device.
    Raises:
        UserError: an argument is not as required, or `device` is "cuda" without CuPy or a GPU.

    Parameters: ``W1`` [inputs, width], ``b1`` [width], ``W2``, … Local.

    >>> MLP([64, 128, 10]).parameters
    Parameters(W1[64, 128], b1[128], W2[128, 10], b2[10]; 9610 float32 values)
    >>> MLP([13, 1], loss="squared").loss.metric
    'r2'
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        loss: str | Loss = "cross-entropy",
        seed: int = 0,
        dtype: npt.DTypeLike = np.float32,
        device: str = "cpu",
    ) -> None:
        try:
            self.sizes = tuple(operator.index(size) for size in sizes)
        except TypeError:
            self.sizes = ()
        if len(self.sizes) < 2 or min(self.sizes) < 1:
            raise UserError(f"sizes must be at least two integers of at least 1: {shown(sizes)}")
        self.inputs, self.outputs = self.sizes[0], self.sizes[-1]
        self.loss = checked_loss(loss)
        self.layers = len(self.sizes) - 1
        xp = _module_of(device)
        random = np.random.default_rng(checked_seed(seed))
        what = f"sizes={shown(list(self.sizes))}: the model"
        require_memory(what, 8 * sum(n * m + m for n, m in pairwise(self.sizes)))
        try:
            initial = self._initial(random, _float_dtype(dtype))
            arrays = {name: xp.asarray(array) for name, array in initial.items()}
            self.parameters = Parameters(arrays)
        except MemoryError as error:
            raise UserError(f"{what} does not fit into memory: {line_of(error)}") from None
        self._outputs: list[Array] = []  # of each layer; in backward, the rectifiers' slopes
        self._deltas: list[Array] = []  # gradient of the loss by each hidden layer's outputs

    def _initial(self, random: np.random.Generator, dtype: np.dtype[Any]) -> dict[str, Array]:
        arrays = {}
        for layer in range(1, self.layers + 1):
            shape = self.sizes[layer - 1], self.sizes[layer]
            deviation = math.sqrt((1 if layer == self.layers else 2) / shape[0])
            arrays[f"W{layer}"] = (deviation * random.standard_normal(shape)).astype(dtype)
            arrays[f"b{layer}"] = np.zeros(shape[1], dtype)
        return arrays

    def _forward(self, x: Array) -> Array:
        xp = array_module(x)
        self._reserve(x)
        a = x
        for layer in range(1, self.layers + 1):
            z = self._outputs[layer - 1][: len(x)]
            xp.matmul(a, self.parameters[f"W{layer}"], out=z)
            z += self.parameters[f"b{layer}"]
            a = z if layer == self.layers else xp.maximum(z, 0, out=z)
        return a

    def _backward(self, x: Array, delta: Array, out: Parameters, ready: Ready) -> None:
        self._backward_layers(x, delta, out, ready)

    def _backward_layers(self, x: Array, delta: Array, out: Parameters, ready: Ready) -> Array:
        """Write the layers' gradient; return the gradient by the first layer's affine outputs."""
        xp = array_module(x)
        for layer in range(self.layers, 0, -1):
            a = x if layer == 1 else self._outputs[layer - 2][: len(x)]
            xp.sum(delta, axis=0, out=out[f"b{layer}"])
            ready(f"b{layer}")
            xp.matmul(a.T, delta, out=out[f"W{layer}"])
            ready(f"W{layer}")
            if layer > 1:
                before = self._deltas[layer - 2][: len(x)]
                xp.matmul(delta, self.parameters[f"W{layer}"].T, out=before)
                before *= xp.greater(a, 0, out=a)  # the rectifier's slope: 1 above 0, else 0
                delta = before
        return delta

    def _reserve(self, x: Array) -> None:
        if not self._outputs or len(self._outputs[0]) < len(x):
            xp = array_module(x)
            widths = self.sizes[1:]
            self._outputs = [xp.empty((len(x), width), x.dtype) for width in widths]
            self._deltas = [xp.empty((len(x), width), x.dtype) for width in widths[:-1]]

    def __repr__(self) -> str:
        loss = "" if self.loss.labels else f", {self.loss!r}"
        return f"{type(self).__name__}({list(self.sizes)}{loss}, {self.parameters.dtype})"


class SoftmaxRegression(MLP):
    """Softmax regression: logits that are affine in the inputs, x W1 + b1.

    Args:
        inputs, classes: their numbers, at least 1.
        seed, dtype, device: as for `MLP`.
    Raises:
        UserError: an argument is not as required, or `device` is "cuda" without CuPy or a GPU.

    Local.
    """

    def __init__(
        self,
        inputs: int,
        classes: int,
        *,
        seed: int = 0,
        dtype: npt.DTypeLike = np.float32,
        device: str = "cpu",
    ) -> None:
        super().__init__([inputs, classes], seed=seed, dtype=dtype, device=device)


def checked_hidden(hidden: Sequence[int]) -> list[int]:
    """Return the widths of hidden layers; raise a UserError unless all are integers above 0."""
    if not isinstance(hidden, Iterable):
        raise UserError(f"hidden={shown(hidden)} must be a sequence of whole numbers")
    return [integer(f"hidden[{i}]", size, 1) for i, size in enumerate(hidden)]


def _float_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    try:
        real = np.dtype(dtype)
    except (TypeError, ValueError):
        real = np.dtype(object)
    if real not in (np.float32, np.float64):
        raise UserError(f"dtype must be float32 or float64: {shown(dtype)}")
    return real


def use_gpu(local_rank: int) -> None:
    """Set CuPy's current device to a GPU of this machine, in turn over the local ranks. Local.

    Args:
        local_rank: `Communicator.local_rank`.
    Raises:
        UserError: CuPy or a GPU is missing.
    """
    cupy = _module_of("cuda")
    cupy.cuda.Device(local_rank % cupy.cuda.runtime.getDeviceCount()).use()


def _module_of(device: str) -> Any:
    if choice("device", device, ("cpu", "cuda")) == "cpu":
        return np
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise UserError(
            f"device 'cuda' needs CuPy, which cannot be imported ({error}): "
            "pip install '.[cuda12x]' or '.[cuda13x]' from the checkout"
        ) from None
    try:
        cupy.cuda.runtime.getDevice()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise UserError(f"device 'cuda' needs a GPU: {error}") from None
    return cupy
