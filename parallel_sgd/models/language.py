"""A byte-level language model: predicts the next byte from the preceding bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..kernels import array_module
from ..parameters import Parameters
from ..validation import integer
from .mlp import MLP, checked_hidden
from .model import Array, Ready

BYTES = 256


class ByteLanguageModel(MLP):
    """A model of the next byte: an `MLP` on the concatenated embeddings of the preceding bytes.

        a_0 = [E[x_1], …, E[x_context]],    then as in `MLP`, with 256 logits

    x is [m, context], bytes from 0 to 255 in order, as integers or as the floats made by data
    sources; y is [m], the byte after each context.

    Args:
        context: number of preceding bytes, at least 1.
        width: of a byte's embedding, at least 1.
        hidden: the width of each hidden layer; without any, the logits are affine in the
            embeddings.
        seed, dtype, device: as for `MLP`; E is normal with variance 1.
    Raises:
        UserError: an argument is not as required, or `device` is "cuda" without CuPy or a GPU.

    Parameters: ``E`` [256, width], ``W1`` [context * width, hidden], ``b1`` [hidden], … Local.

    >>> ByteLanguageModel(context=4, width=8, hidden=[32]).parameters
    Parameters(E[256, 8], W1[32, 32], b1[32], W2[32, 256], b2[256]; 11552 float32 values)
    """

    def __init__(
        self,
        context: int = 8,
        width: int = 16,
        hidden: Sequence[int] = (128,),
        *,
        seed: int = 0,
        dtype: npt.DTypeLike = np.float32,
        device: str = "cpu",
    ) -> None:
        self.context, self.width = integer("context", context, 1), integer("width", width, 1)
        sizes = [self.context * self.width, *checked_hidden(hidden), BYTES]
        super().__init__(sizes, seed=seed, dtype=dtype, device=device)
        self.inputs = self.context
        self._reserve_rows(0)

    def _initial(self, random: np.random.Generator, dtype: np.dtype[Any]) -> dict[str, Array]:
        embeddings = random.standard_normal((BYTES, self.width)).astype(dtype)
        return {"E": embeddings, **super()._initial(random, dtype)}

    def _moved(self, x: Array, y: Array, first: int = 0) -> tuple[Array, Array]:
        _, y = super()._moved(x, y, first)
        x = array_module(self.parameters.flat).asarray(x)
        with np.errstate(invalid="ignore"):
            codes = x.astype(np.uint8)
        wrong = codes != x  # also true for nan, and beyond a byte's range
        if wrong.any():
            i, j = (int(place) for place in np.unravel_index(int(wrong.argmax()), x.shape))
            raise UserError(
                f"x[{first + i}][{j}] = {x[i, j]} must be a byte: a whole number from 0 to 255"
            )
        return codes.astype(np.intp), y

    def _forward(self, x: Array) -> Array:
        if len(self._rows) < len(x):
            self._reserve_rows(len(x))
        rows = self._rows[: len(x)]
        look_up(self.parameters["E"], x.reshape(-1), rows.reshape(-1, self.width))
        return super()._forward(rows)

    def _backward(self, x: Array, delta: Array, out: Parameters, ready: Ready) -> None:
        rows = self._rows[: len(x)]
        delta = self._backward_layers(rows, delta, out, ready)
        xp = array_module(x)
        xp.matmul(delta, self.parameters["W1"].T, out=rows)  # from here on, the rows' gradient
        rows, x = rows.reshape(-1, self.width), x.reshape(-1)
        if xp is np:
            places = self._places[: len(x)]
            look_up(np.arange(out["E"].size).reshape(out["E"].shape), x, places)
            add_rows(rows, places, out["E"])
        else:
            multiply_rows(rows, x, out["E"])
        ready("E")

    def _reserve_rows(self, samples: int) -> None:
        """Allocate buffers for minibatches of up to so many samples."""
        flat = self.parameters.flat
        xp = array_module(flat)
        #: embeddings of a minibatch; after backward, their gradient
        self._rows = xp.empty((samples, self.sizes[0]), flat.dtype)
        #: NumPy: the index in E.ravel() of each value of `_rows`
        places = samples * self.context if xp is np else 0
        self._places = np.empty((places, self.width), np.intp)

    def __repr__(self) -> str:
        return (
            f"ByteLanguageModel(context={self.context}, width={self.width}, "
            f"hidden={list(self.sizes[1:-1])}, {self.parameters.dtype})"
        )


def look_up(table: Array, x: Array, out: Array) -> None:
    """Write out[i] = table[x[i]] for bytes x; with NumPy without a temporary copy."""
    xp = array_module(table)
    xp.take(table, x, axis=0, out=out, **({"mode": "clip"} if xp is np else {}))


def add_rows(rows: Array, places: Array, out: Array) -> None:
    """Write the sum of the rows of each byte, with NumPy: values are added in order.

    Args:
        rows: [n, width].
        places: intp [n, width], the index in the flat `out` to add each value to.
        out: [256, width], contiguous; overwritten.

    `numpy.add.at` is fast on flat arrays only: here four times as fast as with rows as values.
    """
    out.fill(0)
    np.add.at(out.reshape(-1), places.reshape(-1), rows.reshape(-1))


def multiply_rows(rows: Array, x: Array, out: Array) -> None:
    """Write the sum of the rows of each byte, with CuPy: a product with the one-hot bytes.

    CuPy's scatter-add is atomic, in an order that differs from run to run; a product is
    deterministic.

    Args:
        rows: [n, width].
        x: [n], the byte of each row.
        out: [256, width]; overwritten.
    """
    xp = array_module(rows)
    one_hot = (xp.arange(BYTES)[:, None] == x).astype(rows.dtype)
    xp.matmul(one_hot, rows, out=out)
