"""Checks of a program's arrays, of sizes that files declare, and of samples.

Samples are checked as they are read: a file is never scanned in advance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..validation import LARGEST_INTEGER, NUMBERS, kind_of, line_of, shown

Array = npt.NDArray[Any]
DType = npt.DTypeLike | None

MOST_DEFLATED = 1032  #: largest expansion of zlib, in bytes for each byte


def as_array(name: str, values: Any) -> Array:
    """Convert a user's values to a NumPy array, of class `ndarray` or `numpy.memmap`.

    Args:
        name: name of the values in an error.
        values: an array, a list, or any object that NumPy can convert; not changed.
    Returns:
        The array; a view of `values` where NumPy can make a view.
    Raises:
        UserError: the values cannot be converted, or are masked. (An array would silently expose
            the numbers under the mask.)

    Local. Cost: a mask is read once; other arrays are not read.
    """
    if isinstance(values, np.ma.MaskedArray):
        _require_no_mask(name, values)
        values = values.data
    elif isinstance(values, list | tuple):
        for index, row in enumerate(values):
            if isinstance(row, np.ma.MaskedArray):
                _require_no_mask(f"{name}[{index}]", row)
    try:
        array: Array = np.asanyarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # PyTorch raises RuntimeError
        reason = "" if isinstance(error, TypeError) else f" ({line_of(error)})"
        raise UserError(f"{name} must be a NumPy array: it is {kind_of(values)}{reason}") from None
    return array if isinstance(array, np.memmap) else np.asarray(array)


def _require_no_mask(name: str, values: np.ma.MaskedArray[Any, Any]) -> None:
    mask = np.ma.getmaskarray(values)
    if mask.dtype.names is None and mask.any():
        places = np.argwhere(mask)
        where = "".join(f"[{int(i)}]" for i in places[0])
        raise UserError(
            f"{name} has {len(places)} masked values, the first at {where}: must have none: fill "
            "the values in, or remove their samples"
        )


def require_one_index(before: str, x: Any, y: Any) -> None:
    """Raise a UserError if x and y are pandas objects with different indexes or orders.

    Args:
        before: prefix of the error, such as the file's name.
    """
    of_x: Any = getattr(x, "index", None)
    of_y: Any = getattr(y, "index", None)
    if hasattr(of_x, "equals") and hasattr(of_y, "equals") and not of_x.equals(of_y):
        raise UserError(
            f"{before}x and y must have the same index in the same order: align x and y by "
            "the index, or give arrays (to_numpy()) if the index has no meaning"
        )


def require_bytes(what: str, shape: tuple[int, ...], dtype: np.dtype[Any], have: int) -> int:
    """Return the size of an array in bytes, if at least so many bytes are available.

    Args:
        what: name of the array in an error.
        have: the number of available bytes.
    Raises:
        UserError: fewer bytes are available.
    """
    size = math.prod(shape) * dtype.itemsize
    if have < size:
        raise UserError(
            f"{what} is truncated: {max(have, 0)} bytes of data, its shape requires {size}"
        )
    return size


def require_deflatable(what: str, size: int, compressed: int) -> None:
    """Raise a UserError if so many compressed bytes cannot expand to the declared size."""
    if size > MOST_DEFLATED * compressed + 64:
        raise UserError(
            f"{what} is not well-formed: it declares {size} bytes, more than its "
            f"{compressed} compressed bytes can hold"
        )


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
