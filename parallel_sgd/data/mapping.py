"""Arrays in mapped files, which others may cut while they are read."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..files import opened
from ..validation import line_of


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


def mapping_of(array: Any) -> tuple[mmap.mmap, int] | None:
    """The pages that an array, or the one of which it is a view, lies in; None where it does not.

    Returns:
        The pages, which keep their file open, and how many bytes of that must be there.

    Local.
    """
    while array is not None and not isinstance(getattr(array, "base", None), mmap.mmap):
        array = getattr(array, "base", None)
    if not isinstance(array, np.memmap):
        return None
    pages = array.base
    assert isinstance(pages, mmap.mmap)
    begin = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    return pages, begin + len(pages)


def require_whole(name: str, pages: mmap.mmap, end: int) -> None:
    """Raise a UserError where a mapped file has become shorter. Local; one system call."""
    size = pages.size()
    if size < end:
        raise UserError(
            f"{name} has been cut while it is read: its file has {size} bytes left of the "
            f"{end} that it had"
        )
