"""A multilayer perceptron on ids, whose embeddings are rows of a table elsewhere."""

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
    """A table of embeddings as a model sees it: a row of `width` float32 for any id of int64.

    All arrays are NumPy's. A row that nobody has pushed to has its initial value; to look at it
    need not make it.
    """

    @property
    def width(self) -> int: ...

    def rows(self, ids: Ids) -> Array:
        """Return the rows of ids [...], float32 [..., width], the caller's own to change."""

    def push(self, ids: Ids, gradient: Array, samples: int) -> None:
        """Have rows trained.

        Args:
            ids: [...]; the same id may occur several times.
            gradient: float32 [..., width], summed over the samples; what belongs to one id is
                summed. Unchanged; may be a view in which values repeat.
            samples: how many the gradient is of, at least 1.
        """

    def prefetch(self, ids: Ids) -> None:
        """Begin to pull what the next `rows` will ask for: the same ids, in the same shape.

        A hint: where `rows` asks for others, as an evaluation in between does, it gets those.
        """


class EmbeddedMLP(MLP):
    """An `MLP` on the rows of ids: only they are pulled, and only to them gradient is pushed.

        concatenate:  a_0 = [row(x_1), …, row(x_fields)]
        sum:          a_0 = row(x_1) + … + row(x_fields),    then as in `MLP`

    x is int64 [m, fields], any ids. The rows are not among `parameters`: attach a table
    of them, `model.rows = learner.tables["clicks"]`, before the model is used. They are pulled in
    `gradient` and `evaluate`; `gradient` pushes theirs, summed over the minibatch, itself. With
    hidden layers they must not all begin with zeros: no rectifier would ever open.

    Args:
        fields: ids in a sample, at least 1.
        width: of a row, at least 1.
        hidden: the width of each hidden layer; with none, the logits are affine in the rows.
        classes: at least 1.
        combine: "concatenate" for fields of different meaning, "sum" for a bag of ids.
        seed, dtype, device: as for `MLP`. Rows travel as float32 through the host, whatever these.
    Raises:
        UserError: an argument is not as required, or CuPy is asked for and it or a GPU is missing.

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
        self._combined: Array = None  #: a_0 of the latest minibatch; in backward, its gradient
        self._coming: Ids | None = None

    @property
    def rows(self) -> Rows:
        """The table; setting it sees that its rows are as wide as the model's."""
        if self._rows is None:
            raise UserError("the model has no rows yet: model.rows = learner.tables[name]")
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
        """Write the gradient of the parameters, push that of the rows, and return the summed loss.

        Args:
            x: int64 [m, fields].
            y, out, ready: as for every `Model`.
            coming: x of the next minibatch, if there is one. Its rows travel while this minibatch
                is computed, and so do not know this one's gradient yet: they are one older (but
                in mode "sync", where they are pulled after the step).
        Returns:
            The loss, 0.0 where m is 0; then nothing is pulled or pushed for it.
        Raises:
            UserError: as for every `Model`; also ids that are not int64, and where no rows are
                attached.

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
        """See that ids are as required, and bring them to the host."""
        x = x.get() if hasattr(x, "get") else np.asarray(x)
        if x.dtype != np.int64:
            raise UserError(
                f"{name} must hold ids of int64: it has dtype {x.dtype} (a source leaves the "
                "data's own with dtype=None)"
            )
        if x.ndim != 2 or x.shape[1] != self.fields:
            raise UserError(f"{name} must have shape [m, {self.fields}]: it has {shape_of(x)}")
        ids: Ids = x
        return ids

    def _moved(self, x: Array, y: Array, first: int = 0) -> tuple[Array, Array]:
        _ = self.rows  # that they are missing is said first
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
