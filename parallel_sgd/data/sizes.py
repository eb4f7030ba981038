"""Checks of the sizes that a file's header declares, before memory is allocated."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import UserError

MOST_DEFLATED = 1032  #: largest expansion of zlib, in bytes for each byte


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
