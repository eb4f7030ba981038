"""Arrays in mapped files, which others may cut while they are read."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UserError


@dataclass(frozen=True)
class Mapping:
    """A file's pages in memory.

    Attributes:
        pages: which keep the file open.
        end: so many bytes of the file must be there.
    """

    pages: mmap.mmap
    end: int

    def require_whole(self, name: str) -> None:
        """Raise a UserError where the file has become shorter. Local; one system call."""
        size = self.pages.size()
        if size < self.end:
            raise UserError(
                f"{name} has been cut while it is read: its file has {size} bytes left of the "
                f"{self.end} that it had"
            )


def mapping_of(array: Any) -> Mapping | None:
    """The mapping that an array lies in, or the one of which it is a view; else None. Local."""
    while array is not None and not isinstance(getattr(array, "base", None), mmap.mmap):
        array = getattr(array, "base", None)
    if not isinstance(array, np.memmap):
        return None
    pages = array.base
    assert isinstance(pages, mmap.mmap)
    begin = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    return Mapping(pages, begin + len(pages))
