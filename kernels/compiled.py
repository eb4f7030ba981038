"""What the Numba kernels share: how they are compiled, and blocks that travel raw."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from .reference import Array


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call, keep the machine code on disk, and run without the GIL."""
    try:
        kernel = njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError as error:
        warnings.warn(f"kernels are compiled anew in every process: {error}", stacklevel=1)
        kernel = njit(nogil=True, error_model="numpy")(function)
    return kernel  # type: ignore[no-any-return]


@compiled
def encode_raw(g: Array, r: Array, payload: Array, at: int, byte: int, n: int) -> None:
    out = payload[byte : byte + 4 * n].view(np.float32)
    for i in range(n):
        out[i] = g[at + i] + r[at + i]
        r[at + i] = 0


@compiled
def decode_raw(payload: Array, out: Array, byte: int, at: int, n: int, add: bool) -> None:
    q = payload[byte : byte + 4 * n].view(np.float32)
    for i in range(n):
        out[at + i] = out[at + i] + q[i] if add else q[i]


@compiled
def block_at(starts: Array, offsets: Array, i: int) -> tuple[int, int, int, bool]:
    """Block i: its first value, its number of values, its first byte, and whether it is raw."""
    n = starts[i + 1] - starts[i]
    raw = offsets[i + 1] - offsets[i] == 4 * n
    return starts[i] - starts[0], n, offsets[i] - offsets[0], raw
