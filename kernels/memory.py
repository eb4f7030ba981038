"""Arrays placed so that the kernels reach the speed of memory.

NumPy aligns to 16 bytes; 64-byte vector loads that straddle two cache lines then cost encoding a
quarter of its speed. Large arrays begin on a huge page, so that the kernel (Linux, where
transparent huge pages are on or left to the program's wish, which NumPy expresses) can back all
of them with huge pages. That wastes at most a sixteenth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

LINE, HUGE_PAGE = 64, 2 << 20
LARGE = 16 * HUGE_PAGE


def empty(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised NumPy vector of `size` values, on a cache line or a huge page."""
    return _placed(np.empty, size, dtype)


def zeros(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A vector of zeros, placed as `empty` places it. Its memory is taken as it is written."""
    return _placed(np.zeros, size, dtype)


def beyond_caches(array: npt.NDArray[Any]) -> bool:
    """Whether an array is part of so much memory that what is written there is soon forgotten."""
    whole = array if array.base is None else array.base
    nbytes: int = getattr(whole, "nbytes", 0)
    return nbytes >= LARGE


def _placed(make: Callable[..., Any], size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    nbytes = size * np.dtype(dtype).itemsize
    alignment = HUGE_PAGE if nbytes >= LARGE else LINE
    room = make(nbytes + alignment, np.uint8)
    start = -room.ctypes.data % alignment
    placed: npt.NDArray[Any] = room[start : start + nbytes].view(dtype)
    return placed
