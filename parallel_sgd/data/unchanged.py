"""Files that are opened again, or mapped, while they are read: seen to be what they were at first.

A file is known by its device, inode, size and the time of its last change. Local.
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
    """What tells a file from another one, or from its later self: each from 0 to 2^64 - 1.

    Attributes:
        size: in bytes.
        modified: nanoseconds since 1970, modulo 2^64.
    """

    device: int
    inode: int
    size: int
    modified: int


def identity_of(status: os.stat_result) -> Identity:
    """What a file is known by, as `os.stat` or `os.fstat` tell it."""
    modified = status.st_mtime_ns & LARGEST
    return Identity(status.st_dev, status.st_ino, status.st_size, modified)


def reopened(name: str, path: Path, before: Identity) -> BufferedReader:
    """Open a file again.

    Args:
        name: what to call it in an error.
        before: what it was when it was opened first.
    Raises:
        UserError: as `opened`; or it has changed since, or another file has its name.
    """
    file = opened(name, path)
    try:
        require_same(name, before, identity_of(os.fstat(file.fileno())))
    except UserError:
        file.close()
        raise
    return file


def require_same(name: str, before: Identity, now: Identity) -> None:
    """Raise a UserError that says how a file has changed, if it has."""
    if now == before:
        return
    if now[:2] != before[:2]:
        how = "another file has its name now"
    elif now.size != before.size:
        how = f"it has {now.size} bytes, and had {before.size}"
    else:
        how = "it has been written to"
    raise UserError(f"{name} has changed since it was opened: {how}")
