"""Arrays in mapped files, which others may cut or overwrite while they are read."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..files import opened
from ..validation import line_of
from .unchanged import Identity, identity_of, require_same


def mapped_file(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes of a file, memory-mapped: read as they are used.

    Raises:
        UserError: it is missing, not readable, no regular file, or cannot be mapped.

    Local.
    """
    with opened(str(path), path) as file:
        try:
            if not file.seek(0, 2):
                return np.empty(0, np.uint8)
            return np.memmap(file, np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be mapped into memory: {line_of(error)}") from None


class Mapping(NamedTuple):
    """The pages that an array lies in, which keep their file open.

    Attributes:
        end: how many bytes of the file must be there.
        path: of the file; "" where that is not known, or the array's owner may write to it.
        before: what the file was.
    """

    pages: mmap.mmap
    end: int
    path: str
    before: Identity | None

    def require_whole(self, name: str) -> None:
        """Raise a UserError where the file has become shorter. Local; one system call."""
        size = self.pages.size()
        if size < self.end:
            raise UserError(
                f"{name} has been cut while it is read: its file has {size} bytes left of the "
                f"{self.end} that it had"
            )

    def require_unchanged(self, name: str) -> None:
        """Raise a UserError where the file has become shorter or was written to.

        The pages stay those of the first file where another one has taken its name. Local; a
        system call, a few microseconds.
        """
        now = None if self.before is None else _identity_at(self.path)
        if now == self.before and now is not None:
            return
        self.require_whole(name)
        if now is not None and self.before is not None and now[:2] == self.before[:2]:
            require_same(name, self.before, now)


def mapping_of(array: Any) -> Mapping | None:
    """The mapping of an array, or of the one of which it is a view; None where there is none.

    Local.
    """
    while array is not None and not isinstance(getattr(array, "base", None), mmap.mmap):
        array = getattr(array, "base", None)
    if not isinstance(array, np.memmap):
        return None
    pages = array.base
    assert isinstance(pages, mmap.mmap)
    begin = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    path = str(array.filename) if array.filename and array.mode in ("r", "c") else ""
    return Mapping(pages, begin + len(pages), path, _identity_at(path))


def _identity_at(path: str) -> Identity | None:
    """What a file is known by; None where there is none of this name."""
    try:
        return identity_of(os.stat(path))
    except OSError:
        return None
