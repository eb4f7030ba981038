"""Samples of any object whose items are pairs, and conversion of a user's data to a data set."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..validation import NUMBERS, kind_of, line_of, shown
from .dataset import Arrays, Dataset
from .validation import (
    Array,
    DType,
    as_array,
    check_numbers,
    checked_inputs,
    checked_targets,
    float_dtype,
)


class Items(Dataset):
    """Samples of any object with ``__len__`` and ``__getitem__``, whose items are pairs (x, y).

    Args:
        items: item i, from 0, is the pair (x_i, y_i). All x_i have one shape, and all y_i have one
            shape; y_i are all integers or all floats. Only the requested items are read. Item 0 is
            read once if an empty minibatch needs its shape.

    An exception raised by an item's own code becomes a `UserError` with the place in that code.
    """

    def __init__(self, items: Any) -> None:
        if isinstance(items, type) or not all(
            hasattr(items, name) for name in ("__len__", "__getitem__")
        ):
            raise UserError(f"items must have a length, and pairs (x, y): it is {kind_of(items)}")
        self.items = items
        self._empty_pair: tuple[Array, Array] | None = None
        #: of the first item read: True if y is integers, and its index
        self._integers: tuple[bool, int] | None = None

    def __len__(self) -> int:
        try:
            return len(self.items)
        except Exception as error:
            raise UserError(f"the number of items is not known: {_error_text(error)}") from error

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        stored_x, stored_y = self._stored(indexes) if len(indexes) else self._empty()
        kind = float_dtype(dtype)
        x = checked_inputs("x", stored_x, indexes, kind)
        return x, checked_targets("y", stored_y, indexes, kind, classes)

    def _stored(self, indexes: Array) -> tuple[Array, Array]:
        xs, ys = zip(*(self._pair(int(index)) for index in indexes), strict=True)
        return _stacked("x", xs, indexes), _stacked("y", ys, indexes)

    def _pair(self, index: int) -> tuple[Array, Array]:
        try:
            item = self.items[index]
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"item {index} cannot be read: {_error_text(error)}") from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UserError(f"item {index} must be a pair (x, y): it is {kind_of(item)}")
        x, y = _item_array("x", index, item[0]), _item_array("y", index, item[1])
        integers = y.dtype.kind != "f"
        if self._integers is None:
            self._integers = integers, index
        same, first = self._integers
        if integers != same:  # it would depend on the minibatch whether y is int64
            kinds = {True: "whole numbers", False: "floats"}
            raise UserError(
                f"y[{index}] holds {kinds[integers]}, and y[{first}] {kinds[same]}: must be of "
                "one kind"
            )
        return x, y

    def _empty(self) -> tuple[Array, Array]:
        if len(self) == 0:
            return np.empty((0,), np.float32), np.empty((0,), np.int64)
        if self._empty_pair is None:
            x, y = self._stored(np.zeros(1, np.int64))
            self._empty_pair = x[:0], y[:0]
        return self._empty_pair

    def __repr__(self) -> str:
        return f"Items({type(self.items).__name__} of {len(self)} samples)"


def as_dataset(x: Any, y: Any = None) -> Dataset:
    """Convert a user's data to a data set.

    Args:
        x: inputs [n, …], or without `y` a `Dataset` or any object with ``__len__`` and
            ``__getitem__`` whose items are pairs (x_i, y_i).
        y: targets [n, …].
    Returns:
        `x` itself if it is a `Dataset`; else `Arrays` or `Items` around the arguments.
    Raises:
        UserError: `x` is none of these.

    Local.
    """
    if isinstance(x, str | bytes) or hasattr(x, "__fspath__"):
        raise UserError(f"x={shown(x)} must be an array or a data set; `load` reads a file")
    if isinstance(x, Dataset):
        if y is not None:
            raise UserError(
                f"y must not be given with a data set, which has its own: it is {kind_of(y)}"
            )
        return x
    if isinstance(x, np.ndarray) or y is not None:
        return Arrays(x, y)
    if hasattr(x, "__len__") and hasattr(x, "__getitem__") and not isinstance(x, type):
        return Items(x)
    raise UserError(
        "x must be an array, or an object with __len__ and __getitem__ whose items are pairs "
        f"(x, y): it is {kind_of(x)}"
    )


def _item_array(name: str, index: int, values: Any) -> Array:
    """Convert x or y of an item to an array; the name for errors is formatted only if needed."""
    if isinstance(values, np.ma.MaskedArray | list | tuple):
        return as_array(f"{name}[{index}]", values)
    try:
        array: Array = np.asanyarray(values)
    except (TypeError, ValueError, RuntimeError):
        return as_array(f"{name}[{index}]", values)
    if array.dtype.kind not in NUMBERS:
        check_numbers(f"{name}[{index}]", array)
    return array


def _error_text(error: Exception) -> str:
    """Describe an exception of the user's code, and the file and line that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    line = line_of(error)
    kind = type(error).__name__
    text = line if line == kind or isinstance(error, OSError) else f"{kind}: {line}"
    return f"{text} ({Path(place.filename).name}:{place.lineno})"


def _stacked(name: str, rows: tuple[Array, ...], indexes: Array) -> Array:
    for row, index in zip(rows, indexes, strict=True):
        if row.shape != rows[0].shape:
            raise UserError(
                f"{name}[{index}] has shape {list(row.shape)}: must be {list(rows[0].shape)}, "
                f"the shape of {name}[{indexes[0]}]"
            )
    return np.stack(rows)
