"""Detection of files that change while in use: reopened or mapped files are compared.

A file is identified by its device, inode, size and the time of its last change. Local.
"""

from __future__ import annotations

import os
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from ..errors import UserError
from ..files import opened

LARGEST = (1 << 64) - 1


class Identity(NamedTuple):
    """Identity and version of a file; each field from 0 to 2^64 - 1.

    Attributes:
        device, inode: of the file.
        size: in bytes.
        modified: nanoseconds since 1970, modulo 2^64.
    """

    device: int
    inode: int
    size: int
    modified: int


def identity_of(status: os.stat_result) -> Identity:
    """Return the identity of a file from the result of `os.stat` or `os.fstat`."""
    modified = status.st_mtime_ns & LARGEST
    return Identity(status.st_dev, status.st_ino, status.st_size, modified)


def reopened(name: str, path: Path, before: Identity) -> BufferedReader:
    """Open a file again, if it is unchanged.

    Args:
        name: name of the file in an error.
        before: identity of the file when first opened.
    Raises:
        UserError: as `opened`; or the file has changed since, or was replaced by another file.
    """
    file = opened(name, path)
    try:
        require_same(name, before, identity_of(os.fstat(file.fileno())))
    except UserError:
        file.close()
        raise
    return file


def require_same(name: str, before: Identity, now: Identity) -> None:
    """Raise a UserError with the kind of change if a file has changed."""
    if now == before:
        return
    if now[:2] != before[:2]:
        how = "another file now has its name"
    elif now.size != before.size:
        how = f"it has {now.size} bytes, and had {before.size}"
    else:
        how = "it has been written to"
    raise UserError(f"{name} has changed since it was opened: {how}")
