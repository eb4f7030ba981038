"""Common parts of the Numba kernels: their compilation, and raw blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from . import simd
from .machine_code import KernelCache
from .reference import Array


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call, cache the machine code on disk, and run without the GIL."""
    kernel = njit(nogil=True, error_model="numpy")(function)
    kernel._cache = KernelCache(function)
    kernel.compile = kernel._cache.unlocking(kernel.compile)
    return kernel  # type: ignore[no-any-return]


@compiled
def encode_raw(g: Array, r: Array, payload: Array, at: int, byte: int, n: int) -> None:
    simd.encode_raw(g, r, payload, at, byte, n)


@compiled
def decode_raw(payload: Array, out: Array, byte: int, at: int, n: int, add: bool) -> None:
    if add:
        simd.decode_raw_add(payload, out, byte, at, n)
    else:
        simd.decode_raw(payload, out, byte, at, n)


@compiled
def block_at(starts: Array, offsets: Array, i: int) -> tuple[int, int, int, bool]:
    """Return block i: its first value, its length, its first byte, and True if it is raw."""
    n = starts[i + 1] - starts[i]
    raw = offsets[i + 1] - offsets[i] == 4 * n
    return starts[i] - starts[0], n, offsets[i] - offsets[0], raw
