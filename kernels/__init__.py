"""Kernels on arrays: quantization, its inverse, and fused optimizer steps.

There are three bodies with the same signatures and the same bytes: `reference` (plain NumPy, the
specification), `cpu` (Numba) and `cuda` (CUDA C++ through CuPy). Only the bytes of a NaN depend on
the processor. `body(array)` returns the fast body for an array's kind. Bodies are loaded on first
use, so importing this package costs nothing.

All functions are local (no communication), work in place unless an `out` is given, and release the
GIL on the CPU.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from . import memory
from .blocks import Blocks, IndexArray, cut, payload_offsets

__all__ = [
    "Blocks",
    "IndexArray",
    "array_module",
    "body",
    "cut",
    "empty_like",
    "finish_on_device",
    "on_device",
    "on_host",
    "payload_offsets",
    "prepare",
    "row_kernels",
]

Array = Any  #: a NumPy or CuPy array


def array_module(array: Array) -> Any:
    """Return the module with the functions for `array`: numpy, or cupy for a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else np


def on_host(array: Array) -> Any:
    """Return the array itself, or a NumPy copy of a CuPy array."""
    return array if array_module(array) is np else array.get()


def empty_like(array: Array, size: int, dtype: Any = None) -> Array:
    """Return an uninitialised, aligned vector on the device of `array`.

    Args:
        array: gives the device.
        size: the number of values.
        dtype: the array's dtype by default.
    """
    xp = array_module(array)
    return (memory if xp is np else xp).empty(size, dtype or array.dtype)


def zeros_like(array: Array) -> Array:
    """Return an aligned vector of zeros on the device of `array`, of its size and dtype.

    On a CPU the memory is allocated by the system as it is written.
    """
    xp = array_module(array)
    return (memory if xp is np else xp).zeros(array.size, array.dtype)


def on_device(array: Array) -> AbstractContextManager[Any]:
    """Return a context manager that selects an array's GPU, since new threads start on GPU 0."""
    device: AbstractContextManager[Any] = array.device
    return nullcontext() if array_module(array) is np else device


def finish_on_device(array: Array) -> None:
    """Wait for this thread's work on an array's GPU, before another thread uses the array."""
    xp = array_module(array)
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def body(array: Array) -> Any:
    """Return the kernels for an array: module `cuda` for CuPy, `cpu` for NumPy."""
    return _load("cpu" if array_module(array) is np else "cuda")


def prepare(
    calls: Sequence[Callable[[], object]], number: int, say: Callable[[str], object]
) -> None:
    """See `machine_code.prepare`."""
    with _without_garbage_collection():
        _load("machine_code").prepare(calls, number, say)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable the search for cyclic garbage in a `with` block.

    Importing Numba and compiling create many permanent objects, which Python would search again and
    again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def row_kernels() -> Any:
    """Return the kernels for rows found by ids: module `rows`, for NumPy arrays only."""
    return _load("rows")


@cache
def _load(name: str) -> Any:
    return import_module(f".{name}", __name__)
