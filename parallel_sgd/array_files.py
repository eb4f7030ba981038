"""Files of named arrays (safetensors), flushed to the disk, with size and checksum. Local."""

from __future__ import annotations

import hashlib
import importlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .communication import InBackground
from .errors import UserError
from .files import make_new, opened

HostArray = npt.NDArray[Any]
Fact = dict[str, Any]  #: size and checksum of a file: ``{"bytes": …, "sha256": …}``


def require_safetensors() -> Any:
    """Return the library's module `safetensors.numpy`.

    Raises:
        UserError: the library is not installed.
    """
    try:
        importlib.import_module("safetensors")
        return importlib.import_module("safetensors.numpy")
    except ImportError as error:
        raise UserError(
            f"checkpoints need safetensors ({error}): pip install '.[checkpoint]' from the checkout"
        ) from error


def write_arrays(path: Path, arrays: Mapping[str, HostArray]) -> Fact:
    """Write contiguous arrays to a new file, and flush the file to the disk. Return its size and
    checksum."""
    make_new(path)
    mode = path.stat().st_mode
    require_safetensors().save_file(dict(arrays), path)
    path.chmod(stat.S_IMODE(mode))  # some versions remove access by group and others
    return flushed(path)


def open_arrays(path: Path) -> Any:
    """Open a file of arrays: `keys()` returns their names, `get_tensor(name)` reads an array."""
    require_safetensors()
    return importlib.import_module("safetensors").safe_open(path, framework="numpy")


def reading_errors() -> tuple[type[Exception], ...]:
    """Return the exception types of unreadable arrays: due to the file, or to memory."""
    return OSError, MemoryError, importlib.import_module("safetensors").SafetensorError


#: By safetensors' names; no checkpoint has further types.
DTYPES = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BOOL": np.dtype(bool),
}


class StoredArray(Protocol):
    """An array read on demand, whole or by rows of its first axis."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def whole(self) -> HostArray:
        """Read the whole array."""
        ...

    def rows(self, begin: int, end: int) -> HostArray:
        """Read a range of the first axis."""
        ...


class ArrayInMemory:
    """A stored array already in memory."""

    def __init__(self, array: HostArray) -> None:
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def whole(self) -> HostArray:
        return self._array

    def rows(self, begin: int, end: int) -> HostArray:
        return self._array[begin:end]


class ArrayInFile:
    """A stored array in a safetensors file.

    Args:
        file: as returned by `open_arrays`.
        name: of the array.

    Attributes:
        shape, dtype: of the array.
    """

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name, self._slice = file, name, file.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self._slice.get_shape())
        dtype = self._slice.get_dtype()
        if dtype not in DTYPES:
            raise UserError(f"{name} has dtype {dtype}, which checkpoints cannot hold")
        self.dtype = DTYPES[dtype]

    def whole(self) -> HostArray:
        array: HostArray = self._file.get_tensor(self._name)
        return array

    def rows(self, begin: int, end: int) -> HostArray:
        part: HostArray = self._slice[begin:end]
        return part


def flushed(path: Path) -> Fact:
    """Flush a file to the disk. Return its size and checksum."""
    with path.open("rb") as file:
        flushing = InBackground(f"flush {path.name}", lambda: os.fsync(file.fileno()))
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        flushing.result()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file. Raises a UserError if the file is not a regular file."""
    with opened(path.name, path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
