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
    """The library's module `safetensors.numpy`.

    Raises:
        UserError: it is not installed.
    """
    try:
        importlib.import_module("safetensors")
        return importlib.import_module("safetensors.numpy")
    except ImportError as error:
        raise UserError(
            f"checkpoints need safetensors ({error}): pip install '.[checkpoint]' from the checkout"
        ) from error


def write_arrays(path: Path, arrays: Mapping[str, HostArray]) -> Fact:
    """Write contiguous arrays to a new file, and bring it to the disk."""
    make_new(path)
    mode = path.stat().st_mode
    require_safetensors().save_file(dict(arrays), path)
    path.chmod(stat.S_IMODE(mode))  # some versions give the file to this user alone
    return flushed(path)


def open_arrays(path: Path) -> Any:
    """A file of arrays: `keys()` are their names, `get_tensor(name)` reads one."""
    require_safetensors()
    return importlib.import_module("safetensors").safe_open(path, framework="numpy")


def reading_errors() -> tuple[type[Exception], ...]:
    """What arrays raise that cannot be read: for their file, or for memory."""
    return OSError, MemoryError, importlib.import_module("safetensors").SafetensorError


#: By safetensors' names; others are none of ours.
DTYPES = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BOOL": np.dtype(bool),
}


class StoredArray(Protocol):
    """An array that is read when it is asked for, whole or by rows of its first axis."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def whole(self) -> HostArray:
        """All of it."""
        ...

    def rows(self, begin: int, end: int) -> HostArray:
        """A part of the first axis."""
        ...


class ArrayInMemory:
    """One that is there already."""

    def __init__(self, array: HostArray) -> None:
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def whole(self) -> HostArray:
        return self._array

    def rows(self, begin: int, end: int) -> HostArray:
        return self._array[begin:end]


class ArrayInFile:
    """One of a safetensors file.

    Args:
        file: of `open_arrays`.
        name: of the array.

    Attributes:
        shape, dtype: of the array.
    """

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name, self._slice = file, name, file.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self._slice.get_shape())
        dtype = self._slice.get_dtype()
        if dtype not in DTYPES:
            raise UserError(f"{name} is of {dtype}, which no checkpoint holds")
        self.dtype = DTYPES[dtype]

    def whole(self) -> HostArray:
        array: HostArray = self._file.get_tensor(self._name)
        return array

    def rows(self, begin: int, end: int) -> HostArray:
        part: HostArray = self._slice[begin:end]
        return part


def flushed(path: Path) -> Fact:
    """Bring a file to the disk; its size and checksum."""
    with path.open("rb") as file:
        flushing = InBackground(f"flush {path.name}", lambda: os.fsync(file.fileno()))
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        flushing.result()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def checksum(path: Path) -> str:
    """SHA-256 of a file; raises a UserError where it is no regular one."""
    with opened(path.name, path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
