"""How the kernels in Numba are compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call, keep the machine code on disk, and run without the GIL."""
    try:
        kernel = njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError as error:
        warnings.warn(f"kernels are compiled anew in every process: {error}", stacklevel=1)
        kernel = njit(nogil=True, error_model="numpy")(function)
    return kernel  # type: ignore[no-any-return]
