"""Memory-mapped files, checked for cuts and changes by another program while in use."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..files import opened
from ..validation import line_of
from .unchanged import Identity, identity_of, reopened, require_same
from .validation import Array


def mapped_file(path: Path) -> npt.NDArray[np.uint8]:
    """Memory-map the bytes of a file: pages are read as they are used.

    Returns:
        uint8 [bytes], read-only; an array in memory if the file is empty.
    Raises:
        UserError: the file is missing, not readable, no regular file, or cannot be mapped.

    Local.
    """
    with opened(str(path), path) as file:
        return _pages(str(path), file)


def _pages(name: str, file: BufferedReader) -> npt.NDArray[np.uint8]:
    try:
        if not file.seek(0, 2):
            return np.empty(0, np.uint8)
        return np.memmap(file, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be mapped into memory: {line_of(error)}") from None


class Mapping:
    """The mapped pages of an array, and their file.

    Args:
        pages: the mapping; keeps its file open.
        end: how many bytes of the file must be there.
        path: of the file, which is held open; "" if the file's owner may write to it.
        is_private: changes of the pages stay in this process.

    Attributes:
        before: the identity of the file when opened; None if not known.
    """

    def __init__(self, pages: mmap.mmap, end: int, path: str, *, is_private: bool) -> None:
        self.pages, self.end, self.path, self._is_private = pages, end, path, is_private
        self.before: Identity | None = None
        with suppress(OSError):  # the file was removed; its pages remain
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            finalize(self, os.close, self._file)
            self.before = identity_of(os.fstat(self._file))

    def require_whole(self, name: str) -> None:
        """Raise a UserError if the file has become shorter. Local. Cost: a system call."""
        size = self.pages.size()
        if size < self.end:
            raise UserError(
                f"{name} was truncated while in use: its file has {size} bytes left of {self.end}"
            )

    def require_unchanged(self, name: str) -> None:
        """Raise a UserError if the file has become shorter or was written to.

        Replacing the file by another of the same name is no error: the mapped pages stay as before.
        Local. Cost: a system call, a microsecond.
        """
        before = self.before
        if before is None:
            self.require_whole(name)
            return
        now = os.fstat(self._file)
        if now.st_mtime_ns != before.modified or now.st_size != before.size:
            self.require_whole(name)
            require_same(name, before, identity_of(now))

    def pickled(self, name: str, array: Array) -> MappedArray | Array:
        """Return what another process needs to read an array in the pages: its place in the file.

        The numbers themselves if the owner of the file or of the array may write to them, or may
        have changed private pages. Local.

        Args:
            name: name of the array in an error.
        """
        if self.before is None or self._is_private or array.flags.writeable:
            return np.asarray(array)
        first = np.frombuffer(self.pages, np.uint8).ctypes.data - (self.end - len(self.pages))
        place = array.ctypes.data - first
        return MappedArray(
            name, self.path, self.before, place, array.shape, array.strides, array.dtype
        )


class MappedArray(NamedTuple):
    """The place of a read-only array in a file, sent to another process of this machine.

    Attributes:
        name: name of the array in an error.
        path, before: of the file.
        place: of the array's first number in the file, in bytes.
        shape, strides, dtype: of the array.
    """

    name: str
    path: str
    before: Identity
    place: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    def reopened(self) -> Array:
        """Map the file again.

        Raises:
            UserError: the file is missing, cannot be mapped, or has changed.
        """
        name = f"{self.name} ({self.path})"
        with reopened(name, Path(self.path), self.before) as file:
            pages = _pages(name, file)
        return np.ndarray(self.shape, self.dtype, pages, self.place, self.strides)


def mapping_of(array: Any) -> Mapping | None:
    """Return the mapping of an array, or of the array below a view; None if not mapped. Local."""
    while array is not None and not isinstance(getattr(array, "base", None), mmap.mmap):
        array = getattr(array, "base", None)
    if not isinstance(array, np.memmap):
        return None
    pages = array.base
    assert isinstance(pages, mmap.mmap)
    begin = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    path = str(array.filename) if array.filename and array.mode in ("r", "c") else ""
    return Mapping(pages, begin + len(pages), path, is_private=array.mode == "c")
