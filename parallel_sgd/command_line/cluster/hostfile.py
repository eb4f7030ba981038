"""Write the hostfile for the user, and remove the file with the emulated hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import UserError
from ...files import make_new

MARK = "# emulated hosts of process"  #: start of the first line; then the process id
_RECORD = "written"  #: file in the hosts' folder with the hostfile's path, for cleaning up


def require_free_path(path: Path) -> None:
    """Raise a UserError if the path is another file, or the hostfile of running hosts."""
    if not path.parent.is_dir():
        raise UserError(f"hostfile={str(path)!r} must be in a folder that exists")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"hostfile={str(path)!r} must be a plain file, or not exist")
    if not path.exists():
        return
    mark, _, pid = _first_line(path).rpartition(" ")
    if mark != MARK:
        raise UserError(
            f"hostfile={str(path)!r} must not exist, or have been left behind by emulated hosts: "
            "give another name"
        )
    if Path("/proc", pid).exists():
        raise UserError(f"hostfile={str(path)!r} belongs to emulated hosts of process {pid}")


@contextmanager
def hostfile_written(path: Path, lines: str, folder: Path) -> Iterator[None]:
    """Write the hostfile; at the end remove the file, unless another program has replaced it.

    Args:
        path: the hostfile.
        lines: the lines of the hosts.
        folder: the hosts' folder, for a record of the written path.

    Raises:
        UserError: the file cannot be written; see also `require_free_path`.
    """
    require_free_path(path)
    (folder / _RECORD).write_text(str(path.resolve()))
    try:
        make_new(path)
        path.write_text(f"{MARK} {os.getpid()}\n{lines}")
    except OSError as error:
        raise UserError(
            f"hostfile={str(path)!r} must be a file that can be written ({error.strerror})"
        ) from None
    try:
        yield
    finally:
        remove_written(folder)


def remove_written(folder: Path) -> Path | None:
    """Remove the hostfile recorded in a folder, if present and marked. Return its path, or None."""
    try:
        path = Path((folder / _RECORD).read_text())
        if _first_line(path).rpartition(" ")[0] != MARK:
            return None
        path.unlink()
    except FileNotFoundError:  # not written, or removed by another process
        return None
    return path


def _first_line(path: Path) -> str:
    with path.open(errors="replace") as file:
        return file.readline().rstrip("\n")
