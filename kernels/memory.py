"""Allocation of aligned arrays, for kernels at the speed of memory.

NumPy aligns to 16 bytes. 64-byte vector loads across two cache lines then make encoding a quarter
slower. Large arrays begin on a huge page, so the operating system can use huge pages for the whole
array (Linux, with transparent huge pages set to "always", or to "madvise", called by NumPy). This
wastes at most a sixteenth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

LINE, HUGE_PAGE = 64, 2 << 20
LARGE = 16 * HUGE_PAGE


def empty(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialised NumPy vector of `size` values, on a cache line or a huge page."""
    return _placed(np.empty, size, dtype)


def zeros(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a vector of zeros, aligned as in `empty`. The system allocates memory on writing."""
    return _placed(np.zeros, size, dtype)


def beyond_caches(array: npt.NDArray[Any]) -> bool:
    """Return True if an array's memory is so large that written values soon leave the caches.

    The whole allocation counts: `LARGE` or more.
    """
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
