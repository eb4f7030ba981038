"""Sequences of uneven lengths: where they are, and how some of them are read as one array."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..validation import LARGEST_INTEGER, integer, kind_of, require_memory
from .arrays import as_array
from .order import IndexArray
from .validation import Array, DType, check_numbers, checked_targets, float_dtype
from .view import CommunicatorView

FEW = 16  #: sequences that the ranks compare


class Padded(NamedTuple):
    """Sequences in one array, each filled up to the length of the longest.

    Attributes:
        values: [m, longest, …]; [0, 1, …] of none.
        lengths: int64 [m], how many values of each are its own: the tokens.
    """

    values: Array
    lengths: IndexArray

    @property
    def tokens(self) -> int:
        """Of all sequences together."""
        return int(self.lengths.sum())

    @property
    def mask(self) -> Array:
        """bool [m, longest]: whether a place is a token; ``values[mask]`` are all tokens in turn.

        >>> padded([np.array([1, 2, 3]), np.array([4])]).mask.tolist()
        [[True, True, True], [True, False, False]]
        """
        return np.arange(self.values.shape[1]) < self.lengths[:, np.newaxis]


def padded(sequences: Sequence[Any], fill: int = 0) -> Padded:
    """Put sequences into one array: what a model is given to be evaluated, say.

    Args:
        sequences: at least one; arrays [length, …] that are alike but for their lengths.
        fill: what follows the shorter ones.
    Raises:
        UserError: they are not as required.

    Local.

    >>> padded([np.array([1, 2, 3]), np.array([4])]).values.tolist()
    [[1, 2, 3], [4, 0, 0]]
    """
    fill = integer("fill", fill, -LARGEST_INTEGER)
    rows = _alike("sequences", sequences)
    lengths = np.array([len(row) for row in rows])
    return filled_up(np.concatenate(rows), lengths, fill)


def filled_up(tokens: Array, lengths: IndexArray, fill: int) -> Padded:
    """Pad sequences that follow each other in one array.

    Args:
        tokens: [tokens, …], of all sequences.
        lengths: int64 [m], how many of them are of each.
    """
    shape = len(lengths), int(lengths.max(initial=1)), *tokens.shape[1:]
    require_memory(
        f"a minibatch {list(shape)}", int(np.prod(shape, dtype=object)) * tokens.itemsize
    )
    both = Padded(np.full(shape, fill, tokens.dtype), lengths)
    both.values[both.mask] = tokens
    return both


class Sequences(ABC):
    """Numbered sequences, each an x [length, …] and a y: a sequence, too, or one for the whole.

    One is the same whenever it is read.

    Attributes:
        lengths: int64 [n], the tokens of each x, at least 1.
    """

    lengths: IndexArray

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def read(
        self,
        indexes: Array,
        *,
        dtype: DType = np.float32,
        classes: int | None = None,
        y_fill: int = 0,
    ) -> tuple[Padded, Padded | Array]:
        """Read some sequences, in the order given, and check them.

        Args:
            indexes: int [m], each at least 0 and below the number of sequences.
            dtype: the float type of floats; None keeps the stored one. Integers become int64.
            classes: y holds labels, integers from 0 to classes - 1; None: any numbers.
            y_fill: what follows the shorter ones of y, where it holds sequences.
        Returns:
            x padded with zeros, and y padded, or an array [m, …] where it is one for each sequence;
            the caller's own to change.
        Raises:
            UserError: a value is not finite or too large for its type, labels are not integers or
                out of range; the message names the sequence.

        Local.
        """


class SequenceArrays(Sequences):
    """Sequences in memory.

    Args:
        x: a list of arrays [length, …], lengths of at least 1, alike in all else: integers, as ids
            of words, or floats.
        y: a list of arrays like it, with a length of their own (one label a token, say); or an
            array or a list of numbers [n, …]: one for each sequence. Neither is copied.
    Raises:
        UserError: they are not as required.

    Local. Cost: looks at each array's shape.

    >>> words = SequenceArrays([np.array([1, 2, 3]), np.array([4])], [0, 1])
    >>> x, y = words.read(np.array([1, 0]))
    >>> x.values.tolist(), x.lengths.tolist(), y.tolist()
    ([[4, 0, 0], [1, 2, 3]], [1, 3], [1, 0])
    """

    def __init__(self, x: Sequence[Any], y: Any) -> None:
        self._x = _alike("x", x)
        self.lengths = np.array([len(row) for row in self._x], np.int64)
        self._y: list[Array] | Array
        if isinstance(y, list | tuple) and y and getattr(y[0], "ndim", hasattr(y[0], "__len__")):
            self._y = _alike("y", y)
        else:
            self._y = as_array("y", y)
            check_numbers("y", self._y)
            if self._y.ndim == 0:
                raise UserError(f"y must have one row for each sequence: it is {kind_of(y)}")
        if len(self._y) != len(self._x):
            raise UserError(f"x and y must have one length: {len(self._x)} and {len(self._y)}")

    def read(
        self,
        indexes: Array,
        *,
        dtype: DType = np.float32,
        classes: int | None = None,
        y_fill: int = 0,
    ) -> tuple[Padded, Padded | Array]:
        kind = float_dtype(dtype)
        x = _read("x", self._x, indexes, kind, None, 0)
        if isinstance(self._y, list):
            return x, _read("y", self._y, indexes, kind, classes, y_fill)
        return x, checked_targets("y", self._y[indexes], indexes, kind, classes)

    def __repr__(self) -> str:
        return f"SequenceArrays({len(self)} sequences, {self.lengths.sum()} tokens)"


def as_sequences(x: Any, y: Any = None) -> Sequences:
    """Take what a user has as sequences: `Sequences`, or what `SequenceArrays` takes.

    Raises:
        UserError: it is neither.
    """
    if not isinstance(x, Sequences):
        return SequenceArrays(x, y)
    if y is not None:
        raise UserError(
            f"y must not be given beside sequences, which have their own: it is {kind_of(y)}"
        )
    return x


def require_same_sequences(
    sequences: Sequences, comm: CommunicatorView, *, dtype: DType, classes: int | None
) -> str:
    """See that the ranks read the same sequences, by all lengths and the tokens of a few.

    Returns:
        A digest of them.
    Raises:
        SharedError: they differ, or one of those cannot be read on some of the ranks (what is alike
            on all is found where it is trained on).

    Collective.
    """
    digest, problem = hashlib.sha256(sequences.lengths.astype("<i8").tobytes()), None
    spread = np.linspace(0, len(sequences) - 1, min(FEW, len(sequences))).astype(np.int64)
    try:
        x, y = sequences.read(spread, dtype=dtype, classes=classes)
        for values in (x.values, y.values if isinstance(y, Padded) else y):
            digest.update(repr(values.shape).encode() + values.tobytes())
    except UserError as error:
        problem = str(error)
    found = problem or digest.hexdigest()[:16]
    if len(set(comm.allgather_object(found))) > 1:
        comm.raise_together(problem)
        comm.require_agreement({"data": found})
    return found


def _alike(name: str, rows: Any) -> list[Array]:
    """Sequences as arrays that differ in their lengths alone.

    Raises:
        UserError: they do not; or one is empty.
    """
    if isinstance(rows, str | bytes) or not hasattr(rows, "__len__") or len(rows) == 0:
        raise UserError(f"{name} must be a list of arrays, at least one: it is {kind_of(rows)}")
    arrays: list[Array] = []
    for index, row in enumerate(rows):
        array = as_array(f"{name}[{index}]", row)
        check_numbers(f"{name}[{index}]", array)
        if array.ndim == 0 or len(array) == 0:
            shape = list(array.shape)
            raise UserError(f"{name}[{index}] must hold at least one token: its shape is {shape}")
        first = arrays[0] if arrays else array
        if (array.shape[1:], array.dtype) != (first.shape[1:], first.dtype):
            raise UserError(
                f"{name}[{index}] holds {array.dtype} {list(array.shape[1:])}: must be "
                f"{first.dtype} {list(first.shape[1:])}, as {name}[0]"
            )
        arrays.append(array)
    return arrays


def _read(
    name: str,
    rows: list[Array],
    indexes: Array,
    kind: np.dtype[Any] | None,
    classes: int | None,
    fill: int,
) -> Padded:
    """Some sequences, checked all at once; one by one to name the place of what is wrong."""
    wanted = [rows[int(index)] for index in indexes]
    lengths = np.array([len(row) for row in wanted], np.int64)
    tokens = np.concatenate([rows[0][:0], *wanted])
    try:
        checked = checked_targets(name, tokens, np.arange(len(tokens)), kind, classes)
    except UserError:
        for index, row in zip(indexes, wanted, strict=True):
            checked_targets(f"{name}[{index}]", row, np.arange(len(row)), kind, classes)
        raise
    return filled_up(checked, lengths, fill)
