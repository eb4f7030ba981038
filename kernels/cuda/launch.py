"""Compile the kernels for the blocks at hand, and launch them on CuPy's current stream."""

from __future__ import annotations

import functools
import importlib
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from ..blocks import GROUP, Blocks, IndexArray

LARGEST_KEPT = 32 * GROUP  #: values in the longest block held in a warp's registers
EXACT = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")  #: IEEE arithmetic

_BLOCK_THREADS = 128  # equal to the launch bounds in kernel.h and warp.h
_ELEMENT_THREADS, _EACH = 256, 4

#: Device copies by (id of an index array, device): see `_on_device`.
_copies: dict[tuple[int, int], tuple[Any, int]] = {}


def source(file: str) -> str:
    """Return a .cu file with its headers inserted: the complete source for the compiler."""
    text = (Path(__file__).parent / file).read_text()
    return re.sub(r'#include "(\w+\.h)"', lambda include: source(include[1]), text)


def macros(longest: int, **chosen: int) -> dict[str, int]:
    """Return the macros of a block kernel: room for the longest block, in powers of two.

    Includes the `chosen` macros: BITS of levels.cu.
    """
    groups = 1 << (-(-longest // GROUP) - 1).bit_length()
    room = {"GROUPS": groups} if longest <= LARGEST_KEPT else {"GROUPS": 16, "KEPT": 0}
    return {**room, **chosen}


def over_blocks(
    file: str,
    name: str,
    blocks: Blocks,
    arrays: tuple[Any, ...],
    *numbers: int,
    **chosen: int,
) -> None:
    """Launch a kernel, compiled with the `chosen` macros, with a warp for every block."""
    if not len(blocks):
        return
    starts, longest = _on_device(blocks.starts)
    offsets, _ = _on_device(blocks.offsets)
    arguments = (*arrays, starts, offsets, np.int64(len(blocks)), *map(np.int32, numbers))
    over_warps(file, name, len(blocks), arguments, **macros(longest, **chosen))


def over_warps(file: str, name: str, warps: int, arguments: tuple[Any, ...], **chosen: int) -> None:
    """Launch a kernel, compiled with the `chosen` macros, with at least `warps` warps."""
    grid = -(-warps * GROUP // _BLOCK_THREADS)
    kernel(file, name, **chosen)((grid,), (_BLOCK_THREADS,), arguments)


def over_elements(
    file: str,
    name: str,
    arrays: tuple[Any, ...],
    *numbers: np.generic,
    bits: int = 32,
    most_grid: int = 2**31 - 1,
) -> None:
    """Launch a kernel over vectors of equal length, with a thread for every four values."""
    n = arrays[0].size
    grid = min(-(-n // (_ELEMENT_THREADS * _EACH)), most_grid)
    if grid:
        function = kernel(file, name, REAL_BITS=bits)
        function((grid,), (_ELEMENT_THREADS,), (*arrays, np.int64(n), *numbers))


def kernel(file: str, name: str, **chosen: int) -> Any:
    """Return a kernel with these macros, compiled for the current device at the first call."""
    cupy: Any = importlib.import_module("cupy")
    options = tuple(f"-D{macro}={value}" for macro, value in chosen.items())
    return _kernel(cupy, cupy.cuda.Device().id, file, name, options)


@functools.cache
def _kernel(cupy: Any, device: int, file: str, name: str, options: tuple[str, ...]) -> Any:
    return _module(cupy, device, file, options).get_function(name)


@functools.cache
def _module(cupy: Any, device: int, file: str, options: tuple[str, ...]) -> Any:
    """Compile a file as `cupy.RawModule` does, but without flushing denormals.

    RawModule appends -ftz=true to the options (https://github.com/cupy/cupy/issues/9576).
    """
    binary, _ = cupy.cuda.compiler.compile_using_nvrtc(source(file), (*EXACT, *options))
    module = cupy.cuda.Module()
    module.load(binary)
    return module


def _on_device(index: IndexArray) -> tuple[Any, int]:
    """Return the device's copy of an index array, and the longest step between neighbours.

    The copy is of the array that owns the memory, so that parts of blocks share it, and has the
    same lifetime. It is allocated outside CuPy's pool: freeing such memory waits for kernels still
    reading it.
    """
    cupy: Any = importlib.import_module("cupy")
    owner = _owner(index)
    key = (id(owner), cupy.cuda.Device().id)
    if key not in _copies:
        with cupy.cuda.using_allocator(None):
            copy = cupy.asarray(owner)
        cupy.cuda.get_current_stream().synchronize()  # other streams read it, too
        weakref.finalize(owner, _copies.pop, key, None).atexit = False
        _copies[key] = copy, int(np.diff(owner).max(initial=1))
    copy, longest = _copies[key]
    first = (index.ctypes.data - owner.ctypes.data) // index.itemsize
    return copy[first : first + len(index)], longest


def _owner(index: IndexArray) -> IndexArray:
    """Return the index array that owns this array's memory, or the array itself."""
    base = index.base
    if isinstance(base, np.ndarray) and base.dtype == index.dtype and base.ndim == 1:
        return base if base.flags.c_contiguous else index
    return index
