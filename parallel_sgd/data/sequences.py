"""Sequences of different lengths, read as padded arrays."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..validation import LARGEST_INTEGER, integer, kind_of, require_memory
from .order import IndexArray
from .validation import Array, DType, as_array, check_numbers, checked_targets, float_dtype
from .view import CommunicatorView

FEW = 16  #: number of sequences whose tokens the ranks compare


class Padded(NamedTuple):
    """Sequences in a single array, each padded to the length of the longest.

    Attributes:
        values: [m, longest, …]; [0, 1, …] if there is no sequence.
        lengths: int64 [m], the number of tokens of each sequence, without padding.
    """

    values: Array
    lengths: IndexArray

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences together."""
        return int(self.lengths.sum())

    @property
    def mask(self) -> Array:
        """bool [m, longest]: True for a token, False for padding.

        ``values[mask]`` are all tokens in turn.

        >>> padded([np.array([1, 2, 3]), np.array([4])]).mask.tolist()
        [[True, True, True], [True, False, False]]
        """
        return np.arange(self.values.shape[1]) < self.lengths[:, np.newaxis]


def padded(sequences: Sequence[Any], fill: int = 0) -> Padded:
    """Pad sequences into a single array, for example to evaluate a model.

    Args:
        sequences: at least 1; arrays [length, …] that differ in their lengths only.
        fill: the padding value.
    Raises:
        UserError: an argument is not as required.

    Local.

    >>> padded([np.array([1, 2, 3]), np.array([4])]).values.tolist()
    [[1, 2, 3], [4, 0, 0]]
    """
    fill = integer("fill", fill, -LARGEST_INTEGER)
    rows = _checked_arrays("sequences", sequences)
    lengths = np.array([len(row) for row in rows])
    return filled_up(np.concatenate(rows), lengths, fill)


def filled_up(tokens: Array, lengths: IndexArray, fill: int) -> Padded:
    """Pad sequences that are concatenated in a single array.

    Args:
        tokens: [tokens, …], of all sequences.
        lengths: int64 [m], the number of tokens of each sequence.
        fill: the padding value.
    Raises:
        UserError: the padded array would not fit into memory.

    Local.
    """
    shape = len(lengths), int(lengths.max(initial=1)), *tokens.shape[1:]
    require_memory(
        f"a minibatch {list(shape)}", int(np.prod(shape, dtype=object)) * tokens.itemsize
    )
    both = Padded(np.full(shape, fill, tokens.dtype), lengths)
    both.values[both.mask] = tokens
    return both


class Sequences(ABC):
    """Numbered sequences, each an x [length, …] and a y: a sequence, or a target for the whole.

    Reading a sequence again returns the same values.

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
            dtype: the float type of floats; None keeps the stored type. Integers become int64.
            classes: y holds labels, integers from 0 to classes - 1; None: any numbers.
            y_fill: the padding value of y, if y holds sequences.
        Returns:
            x padded with zeros; y padded too, or an array [m, …] of a target for each sequence. The
            caller owns the arrays and may change them.
        Raises:
            UserError: a value is not finite or too large for its type, labels are not integers or
                out of range. The message names the sequence.

        Local.
        """


class SequenceArrays(Sequences):
    """Sequences in memory.

    Args:
        x: a list of arrays [length, …], of lengths from 1, and otherwise of equal shape and dtype:
            integers, such as ids of words, or floats. Not copied.
        y: a list of arrays with their own lengths (a label for each token, say); or an array or a
            list of numbers [n, …], a target for each sequence. Not copied.
    Raises:
        UserError: an argument is not as required.

    Local. Cost: looks at each array's shape.

    >>> words = SequenceArrays([np.array([1, 2, 3]), np.array([4])], [0, 1])
    >>> x, y = words.read(np.array([1, 0]))
    >>> x.values.tolist(), x.lengths.tolist(), y.tolist()
    ([[4, 0, 0], [1, 2, 3]], [1, 3], [1, 0])
    """

    def __init__(self, x: Sequence[Any], y: Any) -> None:
        self._x = _checked_arrays("x", x)
        self.lengths = np.array([len(row) for row in self._x], np.int64)
        self._y: list[Array] | Array
        if isinstance(y, list | tuple) and y and getattr(y[0], "ndim", hasattr(y[0], "__len__")):
            self._y = _checked_arrays("y", y)
        else:
            self._y = as_array("y", y)
            check_numbers("y", self._y)
            if self._y.ndim == 0:
                raise UserError(f"y must have one row for each sequence: it is {kind_of(y)}")
        if len(self._y) != len(self._x):
            raise UserError(f"x and y must have equal lengths: {len(self._x)} and {len(self._y)}")

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
    """Convert a user's data to `Sequences`.

    Returns:
        `x` itself if it is `Sequences`; else `SequenceArrays` of the arguments.
    Raises:
        UserError: the arguments are neither.

    Local.
    """
    if not isinstance(x, Sequences):
        return SequenceArrays(x, y)
    if y is not None:
        raise UserError(
            f"y must not be given with sequences, which have their own: it is {kind_of(y)}"
        )
    return x


def require_same_sequences(
    sequences: Sequences, comm: CommunicatorView, *, dtype: DType, classes: int | None
) -> str:
    """Check that all ranks read the same sequences, by all lengths and the tokens of a few.

    Args:
        sequences: this rank's.
        dtype, classes: as for `Sequences.read`.
    Returns:
        A digest of the sequences, the same on all ranks.
    Raises:
        SharedError: the sequences differ, or some of the ranks cannot read a compared sequence. (A
            sequence unreadable on all ranks is reported when training reaches this sequence.)

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


def _checked_arrays(name: str, rows: Any) -> list[Array]:
    """Convert sequences to arrays that differ in their lengths only.

    Raises:
        UserError: shapes or dtypes differ, or a sequence is empty.
    """
    if isinstance(rows, str | bytes) or not hasattr(rows, "__len__") or len(rows) == 0:
        raise UserError(f"{name} must be a list of at least one array: it is {kind_of(rows)}")
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
    """Read some sequences, checked all at once, or singly if needed to name the bad place."""
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
