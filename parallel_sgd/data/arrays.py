"""Conversion of a user's values to NumPy arrays, without silent changes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import UserError
from ..validation import kind_of, line_of
from .validation import Array


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
