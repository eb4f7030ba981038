"""Files that are read, and files that are written: there whole, or not at all. Local."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from .errors import UserError
from .validation import checked_path, line_of

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def opened(name: str, path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file to read it.

    Args:
        name: what to call it in an error.
    Raises:
        UserError: it is not there, cannot be read, or is no regular file: a pipe would be waited
            for, without end if nobody writes.
    """
    try:
        file = open(  # noqa: SIM115 - the caller's to close
            os.fspath(path), "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)
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


def content_of(name: str, path: str | os.PathLike[str]) -> bytes:
    """All of a file.

    Raises:
        UserError: as `opened`; or the disk fails.
    """
    with opened(name, path) as file:
        try:
            return file.read()
        except OSError as error:
            raise UserError(f"{name} cannot be read: {reason(error)}") from None


def write_whole(
    name: str,
    path: str | os.PathLike[str],
    write: Callable[[Path], object],
    *,
    follow: bool = True,
) -> None:
    """Write a file aside and give it its name, so that it is there whole or not at all.

    Args:
        name: what to call it in an error.
        path: replaced, if it is there; of a link, what it leads to. What is no regular file (a
            device) is written to as it is.
        write: writes to the path that it is given.
        follow: False where nobody has named this very file: then a link itself is replaced.
    Raises:
        UserError: it cannot be written; then no part of it stays behind.
    """
    path = checked_path(name, path, "file")
    with writing(name, path):
        if follow:
            path = Path(os.path.realpath(path))
            if path.exists() and not path.is_file():
                write(path)
                return
        aside = aside_of(path)
        try:
            make_new(aside)
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
        aside = aside_of(Path(os.path.realpath(path)))
        make_new(aside)
        aside.unlink()


def make_new(path: Path) -> None:
    """Make an empty file in the place of what has its name: of a link, that goes, and what it leads
    to stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))


def opened_to_append(path: str | os.PathLike[str]) -> int:
    """The descriptor of a file that grows, made if there is none; not of what a link leads to.

    Raises:
        OSError: it cannot be opened, or is a link or no regular file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which may lead anywhere") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")
    return descriptor


def remove_tree(path: Path) -> None:
    """Remove a folder with all that is in it; of a link, and of a file, that alone.

    Raises:
        OSError: it cannot be removed.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def append_line(name: str, path: Path, line: str) -> None:
    """Add a line to a file, whole or not at all.

    Raises:
        UserError: it cannot be written, or is a link.
    """
    with writing(name, path), open(opened_to_append(path), "ab", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        rest = line.encode() + b"\n"
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(end)
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


def aside_of(path: Path) -> Path:
    """Where a file is while `write_whole` writes it."""
    return path.with_name(f".{path.name}.part")
