"""Memory-mapped files, checked for cuts and changes by another program while in use."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..files import opened
from ..validation import line_of
from .unchanged import Identity, identity_of, require_same


def mapped_file(path: Path) -> npt.NDArray[np.uint8]:
    """Memory-map the bytes of a file: pages are read as they are used.

    Returns:
        uint8 [bytes], read-only; an array in memory if the file is empty.
    Raises:
        UserError: the file is missing, not readable, no regular file, or cannot be mapped.

    Local.
    """
    with opened(str(path), path) as file:
        try:
            if not file.seek(0, 2):
                return np.empty(0, np.uint8)
            return np.memmap(file, np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be mapped into memory: {line_of(error)}") from None


class Mapping:
    """The mapped pages of an array, and their file.

    Args:
        pages: the mapping; keeps its file open.
        end: how many bytes of the file must be there.
        path: of the file, which is held open; "" if the file's owner may write to it.

    Attributes:
        before: the identity of the file when opened; None if not known.
    """

    def __init__(self, pages: mmap.mmap, end: int, path: str) -> None:
        self.pages, self.end = pages, end
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
                f"{name} has been cut while it is read: its file has {size} bytes left of the "
                f"{self.end} that it had"
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
    return Mapping(pages, begin + len(pages), path)
