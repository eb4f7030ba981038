"""A multilayer perceptron on ids, with embeddings in a table outside of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..kernels import array_module
from ..parameters import Parameters
from ..validation import choice, integer, kind_of
from .losses import shape_of
from .mlp import MLP, checked_hidden
from .model import Array, Ready, as_numbers

Ids = npt.NDArray[np.int64]


class Rows(Protocol):
    """The interface of an embedding table for models: a row of `width` float32 for any int64 id.

    All arrays are NumPy's. A row without pushes has its initial value; reading such a row does not
    store the row.
    """

    @property
    def width(self) -> int: ...

    def rows(self, ids: Ids) -> Array:
        """Return the rows of ids [...]: float32 [..., width], owned by the caller. May wait."""

    def push(self, ids: Ids, gradient: Array, samples: int) -> None:
        """Train rows by a gradient.

        Args:
            ids: [...]; the same id may occur several times.
            gradient: float32 [..., width], summed over the samples; the gradients of equal ids are
                added. Unchanged; may be a view with repeated values (broadcast).
            samples: number of samples in the gradient, at least 1.
        """

    def prefetch(self, ids: Ids) -> None:
        """Start pulling the rows for the next call of `rows`: the same ids, in the same shape.

        Only a hint: if `rows` is called with other ids, as an evaluation in between does, `rows`
        returns the rows of these ids.
        """


class EmbeddedMLP(MLP):
    """An `MLP` on the rows of ids: only these rows are pulled, and only these get gradient pushes.

        concatenate:  a_0 = [row(x_1), …, row(x_fields)]
        sum:          a_0 = row(x_1) + … + row(x_fields),    then as in `MLP`

    x is int64 [m, fields], any ids. The rows are not among `parameters`: attach a table of rows,
    `model.rows = learner.tables["clicks"]`, before using the model. `gradient` and `evaluate` pull
    rows; `gradient` also pushes the rows' gradient, summed over the minibatch. With hidden layers
    the rows must not all begin with zeros: no rectifier would ever open.

    Args:
        fields: ids in a sample, at least 1.
        width: of a row, at least 1.
        hidden: the width of each hidden layer; without any, the logits are affine in the rows.
        classes: at least 1.
        combine: "concatenate" for fields of different meaning, "sum" for a bag of ids.
        seed, dtype, device: as for `MLP`. Rows always travel as float32 through the host.
    Raises:
        UserError: an argument is not as required, or `device` is "cuda" without CuPy or a GPU.

    Parameters: ``W1`` [fields * width or width, hidden], ``b1`` [hidden], … Local.

    >>> EmbeddedMLP(fields=3, width=8, hidden=[16], classes=2).parameters
    Parameters(W1[24, 16], b1[16], W2[16, 2], b2[2]; 434 float32 values)
    """

    def __init__(
        self,
        fields: int,
        width: int,
        hidden: Sequence[int] = (64,),
        classes: int = 2,
        *,
        combine: str = "concatenate",
        seed: int = 0,
        dtype: npt.DTypeLike = np.float32,
        device: str = "cpu",
    ) -> None:
        self.fields, self.width = integer("fields", fields, 1), integer("width", width, 1)
        self.combine = choice("combine", combine, ("concatenate", "sum"))
        inputs = self.width * (self.fields if self.combine == "concatenate" else 1)
        sizes = [inputs, *checked_hidden(hidden), integer("classes", classes, 1)]
        super().__init__(sizes, seed=seed, dtype=dtype, device=device)
        self.inputs = self.fields
        self._rows: Rows | None = None
        self._combined: Array = None  #: a_0 of the latest minibatch; after backward, its gradient
        self._coming: Ids | None = None

    @property
    def rows(self) -> Rows:
        """The attached table; the setter checks that the table's rows have the model's width."""
        if self._rows is None:
            raise UserError("the model has no rows yet: set model.rows = learner.tables[name]")
        return self._rows

    @rows.setter
    def rows(self, table: Rows) -> None:
        if not all(hasattr(table, name) for name in ("width", "rows", "push", "prefetch")):
            raise UserError(
                f"model.rows must be a table, learner.tables[name]: it is {kind_of(table)}"
            )
        if table.width != self.width:
            raise UserError(
                f"the table's rows have width={table.width}, the model's have width={self.width}: "
                "they must be the same"
            )
        self._rows = table

    def gradient(
        self,
        x: Array,
        y: Array,
        out: Parameters,
        ready: Ready = lambda name: None,
        coming: Array | None = None,
    ) -> float:
        """Write the parameters' gradient, push the rows' gradient, and return the summed loss.

        Args:
            x: int64 [m, fields].
            y, out, ready: as for every `Model`.
            coming: x of the next minibatch, if there is a next. Its rows are pulled while this
                minibatch is computed, so these rows lack this minibatch's gradient: they are one
                update older. (In mode "sync" they are pulled after the step.)
        Returns:
            The loss; 0.0 if m is 0, without pull or push.
        Raises:
            UserError: as for every `Model`; also if ids are not int64, or no rows are attached.

        Local; waits for the table.
        """
        x = as_numbers("x", x)
        coming = None if coming is None else as_numbers("coming", coming)
        self._coming = self._ids("coming", coming) if coming is not None and len(coming) else None
        if len(x) == 0:
            self._prefetch()
        try:
            return super().gradient(x, y, out, ready)
        finally:
            self._coming = None

    def _ids(self, name: str, x: Array) -> Ids:
        """Check ids, and copy them to the host."""
        x = x.get() if hasattr(x, "get") else np.asarray(x)
        if x.dtype != np.int64:
            raise UserError(
                f"{name} must hold ids of int64: it has dtype {x.dtype} (with dtype=None a "
                "source keeps the data's dtype)"
            )
        if x.ndim != 2 or x.shape[1] != self.fields:
            raise UserError(f"{name} must have shape [m, {self.fields}]: it has {shape_of(x)}")
        ids: Ids = x
        return ids

    def _moved(self, x: Array, y: Array, first: int = 0) -> tuple[Array, Array]:
        _ = self.rows  # missing rows are the first error
        ids = self._ids("x", x)
        return ids, super()._moved(ids, y, first)[1]

    def _prefetch(self) -> None:
        if self._coming is not None:
            self.rows.prefetch(self._coming)
            self._coming = None

    def _forward(self, x: Array) -> Array:
        rows = self.rows.rows(x)
        self._prefetch()
        flat = self.parameters.flat
        rows = array_module(flat).asarray(rows, dtype=flat.dtype)
        if self.combine == "sum":
            self._combined = rows.sum(axis=1)
        else:
            self._combined = rows.reshape(len(x), self.sizes[0])
        return super()._forward(self._combined)

    def _backward(self, x: Array, delta: Array, out: Parameters, ready: Ready) -> None:
        combined = self._combined
        delta = self._backward_layers(combined, delta, out, ready)
        array_module(delta).matmul(delta, self.parameters["W1"].T, out=combined)
        gradient = combined.get() if hasattr(combined, "get") else combined
        gradient = gradient.astype(np.float32, copy=False)
        if self.combine == "sum":
            shape = len(x), self.fields, self.width
            gradient = np.broadcast_to(gradient[:, None, :], shape)
        else:
            gradient = gradient.reshape(len(x), self.fields, self.width)
        self.rows.push(x, gradient, len(x))

    def __repr__(self) -> str:
        return (
            f"EmbeddedMLP(fields={self.fields}, width={self.width}, "
            f"hidden={list(self.sizes[1:-1])}, classes={self.classes}, "
            f"combine={self.combine!r}, {self.parameters.dtype})"
        )
