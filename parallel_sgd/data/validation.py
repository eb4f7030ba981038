"""Checks of samples, made as samples are read: a file is never scanned in advance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..validation import LARGEST_INTEGER, NUMBERS, shown

Array = npt.NDArray[Any]
DType = npt.DTypeLike | None


def float_dtype(dtype: DType) -> np.dtype[Any] | None:
    """Return the float type to convert x to, or None to keep the stored type.

    Raises:
        UserError: `dtype` names no float type.
    """
    if dtype is None:
        return None
    try:
        real = np.dtype(dtype)
    except (TypeError, ValueError):
        real = np.dtype(object)
    if real.kind != "f":
        raise UserError(
            f"dtype={shown(dtype)} must be a float type, or None to keep the stored type"
        )
    return real


def check_numbers(name: str, x: Array) -> None:
    """Raise a UserError unless data are bool, integers or floats: objects could execute code."""
    if x.dtype.kind not in NUMBERS:
        raise UserError(f"{name} must hold plain numbers: it has dtype {x.dtype}")


def place_name(indexes: Array, place: Sequence[Any]) -> str:
    """Format a place in a minibatch by its indexes in the data set, as "[7][0]"."""
    return "".join(f"[{int(i)}]" for i in (indexes[place[0]], *place[1:]))


def checked_inputs(name: str, stored: Array, indexes: Array, dtype: np.dtype[Any] | None) -> Array:
    """Convert the inputs (or float targets) of a minibatch, and check that all are finite.

    Args:
        name: name of the values in an error.
        stored: [m, …], as read.
        indexes: int [m], places of the samples in the data set, for the error.
        dtype: the float type to convert to; None keeps the stored type, in native byte order.
    Returns:
        [m, …]: the numbers.
    Raises:
        UserError: a value is not a finite number, or too large for `dtype`.
    """
    check_numbers(name, stored)
    with np.errstate(over="ignore", invalid="ignore"):
        x = stored.astype(dtype or stored.dtype.newbyteorder("="), copy=False)
        if x.dtype.kind != "f" or np.isfinite(x.sum()):
            return x
    finite = np.isfinite(x)
    if not finite.all():  # else only the sum overflowed
        place = tuple(np.argwhere(~finite)[0])
        where = place_name(indexes, place)
        value = stored[place]
        problem = "is too large for " + str(x.dtype) if np.isfinite(value) else "is not finite"
        raise UserError(f"{name}{where} = {value} {problem}: must be a finite number")
    return x


def checked_targets(
    name: str, stored: Array, indexes: Array, dtype: np.dtype[Any] | None, classes: int | None
) -> Array:
    """Convert the targets of a minibatch, labels or other numbers, and check them.

    Args:
        name, stored, indexes: as for `checked_inputs`.
        dtype: the float type for floats; None keeps the stored type.
        classes: targets are labels below this; None: any numbers.
    Returns:
        [m, …]: int64 if integers are stored, of any sign; else floats.
    Raises:
        UserError: labels as for `checked_labels`; else the values are not numbers, not finite, or
            too large for int64 or `dtype`.
    """
    if classes is not None:
        return checked_labels(name, stored, indexes, classes)
    if stored.dtype.kind == "f":
        return checked_inputs(name, stored, indexes, dtype)
    check_numbers(name, stored)
    y = stored.astype(np.int64, copy=False)
    if stored.dtype == np.uint64 and (y < 0).any():
        place = tuple(np.argwhere(y < 0)[0])
        where = place_name(indexes, place)
        raise UserError(f"{name}{where} = {stored[place]} is too large for int64")
    return y


def checked_labels(
    name: str, stored: Array, indexes: Array, classes: int = LARGEST_INTEGER
) -> Array:
    """Convert the labels of a minibatch to int64, and check that all are in range.

    Args:
        name, stored, indexes: as for `checked_inputs`.
        classes: labels must be below this.
    Returns:
        int64 [m, …].
    Raises:
        UserError: the labels are not integers, or a label is out of range.
    """
    if stored.dtype.kind not in "iu":
        raise UserError(f"{name} must hold integer labels: it has dtype {stored.dtype}")
    y = stored.astype(np.int64, copy=False)
    bad = (y < 0) | (y >= classes)
    if bad.any():
        place = tuple(np.argwhere(bad)[0])
        where = place_name(indexes, place)
        required = "at least 0" if classes == LARGEST_INTEGER else f"from 0 to {classes - 1}"
        raise UserError(f"{name}{where} = {stored[place]} is out of range: must be {required}")
    return y
