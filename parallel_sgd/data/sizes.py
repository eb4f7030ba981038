"""What the head of a file declares: seen to be there, before memory is taken for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import UserError

MOST_DEFLATED = 1032  #: bytes that a byte of zlib's can stand for


def require_bytes(what: str, shape: tuple[int, ...], dtype: np.dtype[Any], have: int) -> int:
    """Return how many bytes an array takes, where that many are there."""
    size = math.prod(shape) * dtype.itemsize
    if have < size:
        raise UserError(
            f"{what} is truncated: {max(have, 0)} bytes of data, its shape requires {size}"
        )
    return size


def require_deflatable(what: str, size: int, compressed: int) -> None:
    """See that compressed bytes could hold as many as are declared."""
    if size > MOST_DEFLATED * compressed + 64:
        raise UserError(
            f"{what} is not well-formed: it claims {size} bytes, which its {compressed} "
            "compressed ones cannot hold"
        )
