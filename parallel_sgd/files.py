"""Files that are read, and files that are written: there whole, or not at all. Local."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .errors import UserError
from .validation import checked_path, line_of

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def opened(name: str, path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file to read it.

    Args:
        name: what to call it in an error.
    Raises:
        UserError: it is not there, cannot be read, or is no regular file: a pipe would be waited
            for, without end if nobody writes.
    """
    try:
        file = open(  # noqa: SIM115 - the caller's to close
            path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)
        )
    except FileNotFoundError:
        raise UserError(f"{name}: there is no such file") from None
    except (OSError, ValueError) as error:  # a ValueError: a zero byte in the path
        raise UserError(f"{name} cannot be read: {reason(error)}") from None
    kind = stat.S_IFMT(os.fstat(file.fileno()).st_mode)
    if kind != stat.S_IFREG:
        file.close()
        raise UserError(f"{name} must be a regular file: it is {_KINDS.get(kind, 'none')}")
    return file


def write_whole(name: str, path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Write a file aside and give it its name, so that it is there whole or not at all.

    Args:
        name: what to call it in an error.
        path: replaced, if it is there; of a link, what it leads to. What is no regular file (a
            device) is written to as it is.
        write: writes to the path that it is given.
    Raises:
        UserError: it cannot be written; then no part of it stays behind.
    """
    path = checked_path(name, path, "file")
    with writing(name, path):
        path = Path(os.path.realpath(path))
        if path.exists() and not path.is_file():
            write(path)
            return
        aside = _aside(path)
        try:
            write(aside)
            os.replace(aside, path)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise


def require_writable(name: str, path: Path) -> None:
    """See that `write_whole` can write a file: begin with it, and remove that.

    Raises:
        UserError: it cannot.
    """
    with writing(name, path):
        aside = _aside(Path(os.path.realpath(path)))
        aside.touch()
        aside.unlink()


def append_line(name: str, path: Path, line: str) -> None:
    """Add a line to a file, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    with writing(name, path), path.open("ab", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        rest = line.encode() + b"\n"
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            os.truncate(path, end)
            raise


@contextmanager
def writing(name: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """An error of the disk's, where a file is written, is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{name}={str(path)!r} cannot be written: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Why something was refused, in the system's words where it has any."""
    return getattr(error, "strerror", None) or line_of(error)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")
