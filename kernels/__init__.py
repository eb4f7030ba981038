"""Array in, array out: quantization, its inverse, and fused optimizer steps.

One signature, three bodies, the same bytes: `reference` (plain NumPy, the specification), `cpu`
(Numba) and `cuda` (CUDA C++ through CuPy); but a NaN has the bytes that a processor gives it.
`body(array)` is the fast one for that array's kind; a body is loaded when it is first asked for, so
importing this package costs nothing.

Every function is local (no communication), works in place where no `out` is given, and releases the
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
from .blocks import Blocks, cut, payload_offsets

__all__ = [
    "Blocks",
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
    """The module whose functions work on `array`: numpy, or cupy for a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else np


def on_host(array: Array) -> Any:
    """The array itself, or a NumPy copy of a CuPy array."""
    return array if array_module(array) is np else array.get()


def empty_like(array: Array, size: int, dtype: Any = None) -> Array:
    """An uninitialised vector on the device of `array`, well aligned, of its dtype or another."""
    xp = array_module(array)
    return (memory if xp is np else xp).empty(size, dtype or array.dtype)


def zeros_like(array: Array) -> Array:
    """A vector of zeros on the device of `array`, well aligned, of its size and dtype. On a CPU its
    memory is taken as it is written."""
    xp = array_module(array)
    return (memory if xp is np else xp).zeros(array.size, array.dtype)


def on_device(array: Array) -> AbstractContextManager[Any]:
    """In a `with` block, work on an array's GPU: a new thread of CuPy's begins on the first one."""
    device: AbstractContextManager[Any] = array.device
    return nullcontext() if array_module(array) is np else device


def finish_on_device(array: Array) -> None:
    """Wait until this thread's work on an array's GPU is done: before another thread goes on."""
    xp = array_module(array)
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def body(array: Array) -> Any:
    """The kernels for an array: module `cuda` for CuPy, `cpu` for NumPy."""
    return _load("cpu" if array_module(array) is np else "cuda")


def prepare(
    calls: Sequence[Callable[[], object]], number: int, say: Callable[[str], object]
) -> None:
    """See `machine_code.prepare`."""
    with _without_garbage_collection():
        _load("machine_code").prepare(calls, number, say)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """In a `with` block, let Python look for no cyclic garbage: importing Numba and compiling make
    many objects that stay, which Python would look through again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def row_kernels() -> Any:
    """The kernels for rows that are found by ids: module `rows`, for NumPy arrays only."""
    return _load("rows")


@cache
def _load(name: str) -> Any:
    return import_module(f".{name}", __name__)
