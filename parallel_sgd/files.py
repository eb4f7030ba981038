"""Files: reading regular files, and writing files whole or not at all. Local."""

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
    """Open a file for reading.

    Args:
        name: the file's name in errors.
    Raises:
        UserError: the file does not exist, cannot be read, or is not a regular file: opening a pipe
            without a writer would never end.
    """
    try:
        file = open(  # noqa: SIM115 - the caller closes it
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
    """Return the content of a file.

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
    """Write a file under a temporary name, then rename, so that the file appears whole or not at
    all.

    Args:
        name: the file's name in errors.
        path: an existing file is replaced; for a link, the link's target. An existing path that is
            no regular file (a device) is written directly.
        write: writes to the path given to it.
        follow: False for a path not chosen by the user: then a link itself is replaced.
    Raises:
        UserError: writing fails; no partial file remains.
    """
    path = checked_path(name, path, "file")
    with writing(name, path):
        if follow:
            path = Path(os.path.realpath(path))
            if path.exists() and not path.is_file():
                write(path)
                return
        aside = part_path(path)
        try:
            make_new(aside)
            write(aside)
            os.replace(aside, path)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise


def require_place(name: str, path: str | os.PathLike[str]) -> None:
    """Check that a path is that of a file, or of a new file in a folder that exists.

    Raises:
        UserError: it is not.
    """
    place = os.path.abspath(checked_path(name, path, "file"))
    if os.path.isdir(place) or not os.path.isdir(os.path.dirname(place)):
        raise UserError(f"{name}={path} must be a file in a folder that exists")


def require_writable(name: str, path: Path) -> None:
    """Check that `write_whole` can write a file, by creating and removing the temporary file.

    Raises:
        UserError: the file cannot be written.
    """
    with writing(name, path):
        aside = part_path(Path(os.path.realpath(path)))
        make_new(aside)
        aside.unlink()


def make_new(path: Path) -> None:
    """Create an empty file, replacing an existing file of this name. A link is removed, and its
    target stays unchanged.

    Raises:
        OSError: the file cannot be created.
    """
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))


def opened_to_append(path: str | os.PathLike[str]) -> int:
    """Open a file for appending, without following links, and return its descriptor. The file is
    created if necessary.

    Raises:
        OSError: opening fails, or the path is a link or no regular file.
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
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def remove_tree(path: Path) -> None:
    """Remove a folder with its content; of a link or a file, only that itself.

    Raises:
        OSError: removing fails.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def append_line(name: str, path: Path, line: str) -> None:
    """Append a line to a file, whole or not at all.

    Raises:
        UserError: writing fails, or the path is a link.
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
    """Turn an OSError while writing a file into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{name}={str(path)!r} cannot be written: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Return the reason of an error, in the system's words if there are any."""
    return getattr(error, "strerror", None) or line_of(error)


def part_path(path: Path) -> Path:
    """Return the temporary path used by `write_whole`."""
    return path.with_name(f".{path.name}.part")
