"""Parquet and Arrow files, and folders of them, as data sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ...errors import UserError
from ...files import reason
from ...validation import checked_path
from .column_files import ArrowFile, ColumnFile, ParquetFile
from .columns import MOST_BYTES, Columns, Names
from .parts import REQUIRED, Parts, both_parts, is_system_file, parts_of

PARQUET, ARROW = (".parquet",), (".arrow", ".feather")

PathLike = str | os.PathLike[str]
File = TypeVar("File")


def load_parquet(
    path: PathLike,
    *,
    x: Names | None = None,
    y: Names | None = None,
    most_bytes: int = MOST_BYTES,
) -> Columns:
    """Columns of a Parquet file, or of all ``.parquet`` files of a folder by their sorted names.

    Args:
        path: of the file or the folder (not what is below it), without parts to train and to test
            on.
        x, y, most_bytes: as for `Columns`, which says what is read when, and what is refused.
    Raises:
        UserError: as for `Columns`, or pyarrow is missing, or a file is missing or malformed.

    Local: now, every rank reads the foot of each file.
    """
    return Columns(open_files(path, PARQUET, ParquetFile), x=x, y=y, most_bytes=most_bytes)


def load_arrow(
    path: PathLike,
    *,
    x: Names | None = None,
    y: Names | None = None,
    most_bytes: int = MOST_BYTES,
) -> Columns:
    """As `load_parquet`, of Arrow files (``.arrow``, ``.feather`` of version 2): record batches are
    the groups, and now one column of numbers is read, to see how many rows each has."""
    return Columns(open_files(path, ARROW, ArrowFile), x=x, y=y, most_bytes=most_bytes)


def parquet_parts(
    folder: PathLike,
    *,
    x: Names | None = None,
    y: Names | None = None,
    most_bytes: int = MOST_BYTES,
) -> tuple[Columns, Columns]:
    """Parquet files of a folder as (training, test), by the words in the names of files and of
    folders: ``train``, ``training`` beside ``test``, ``testing``, ``holdout``, or else ``val``,
    ``valid``, ``validation``, ``dev``, ``eval``. Where both kinds are there, those to validate on
    are left out.

    Args:
        x, y, most_bytes: as for `Columns`; `most_bytes` is for each of the two. The test data have
            the columns of the training.
    Raises:
        UserError: as for `load_parquet`, one of the two is missing, or the folder holds other files
            of columns, or several words of one kind.

    Local.
    """
    return _both(*open_parts(folder, PARQUET, ParquetFile), x=x, y=y, most_bytes=most_bytes)


def arrow_parts(
    folder: PathLike,
    *,
    x: Names | None = None,
    y: Names | None = None,
    most_bytes: int = MOST_BYTES,
) -> tuple[Columns, Columns]:
    """As `parquet_parts`, of Arrow files."""
    return _both(*open_parts(folder, ARROW, ArrowFile), x=x, y=y, most_bytes=most_bytes)


def _both(
    train: Sequence[ColumnFile],
    test: Sequence[ColumnFile],
    *,
    x: Names | None,
    y: Names | None,
    most_bytes: int,
) -> tuple[Columns, Columns]:
    """Two data sets of the same columns in the same order, whatever their order in the files."""
    training = Columns(train, x=x, y=y, most_bytes=most_bytes)
    of_y = training.y_columns[0] if y is None else y
    return training, Columns(test, x=training.x_columns, y=of_y, most_bytes=most_bytes)


def is_parquet(path: Path) -> bool:
    """Whether a path is named as a Parquet file, or is a folder that holds some. Local."""
    return path.suffix.lower() in PARQUET or bool(entries_of(path, PARQUET))


def is_arrow(path: Path) -> bool:
    """Whether a path is named as an Arrow file, or is a folder that holds some. Local."""
    return path.suffix.lower() in ARROW or bool(entries_of(path, ARROW))


def has_parquet_parts(path: Path) -> bool:
    """Whether a folder of Parquet files is cut into training and test; a UserError in doubt.
    Local."""
    return parts_in(path, PARQUET) is not None


def has_arrow_parts(path: Path) -> bool:
    """Whether a folder of Arrow files is cut into training and test; a UserError in doubt.
    Local."""
    return parts_in(path, ARROW) is not None


def parquet_skipped(path: Path) -> tuple[Path, ...]:
    """Files and folders that `parquet_parts` leaves out. Local."""
    return _skipped(path, PARQUET)


def arrow_skipped(path: Path) -> tuple[Path, ...]:
    """Files and folders that `arrow_parts` leaves out. Local."""
    return _skipped(path, ARROW)


def _skipped(folder: Path, suffixes: tuple[str, ...]) -> tuple[Path, ...]:
    parts = parts_in(folder, suffixes)
    return parts.skipped if parts else ()


def parts_in(folder: Path, suffixes: tuple[str, ...]) -> Parts | None:
    """The parts of a folder of files, as `parts_of`. Local."""
    return parts_of(folder, entries_of(folder, suffixes))


def entries_of(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a folder, and its folders that hold some; none where it cannot be read."""
    return [
        path
        for path in listed(folder)
        if _is_data(path, suffixes) or (path.is_dir() and _files(path, suffixes))
    ]


def _files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """A file, or those of a folder in the order of their names."""
    if not path.is_dir():
        return [path]
    return [file for file in listed(path) if _is_data(file, suffixes)]


def listed(folder: Path) -> list[Path]:
    """The files and folders in a folder that may be data; none where it cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if not is_system_file(path.name))
    except OSError:  # of which its reader tells
        return []


def _is_data(path: Path, suffixes: tuple[str, ...]) -> bool:
    name = path.name.lower()
    return name.endswith(suffixes) and not name.startswith((".", "_")) and not path.is_dir()


def open_files(
    path: PathLike, suffixes: tuple[str, ...], kind: Callable[[Path], File]
) -> list[File]:
    """The file that a path leads to, or those of the folder.

    Raises:
        UserError: there is none, or the folder holds parts to train and to test on.
    """
    place = checked_path("path", path, "file")
    if not place.is_dir():
        return [kind(place)]
    try:
        os.scandir(place).close()
    except OSError as error:
        raise UserError(f"{place} cannot be read: {reason(error)}") from None
    if parts_in(place, suffixes) is not None:
        raise UserError(both_parts(place))
    files = _files(place, suffixes)
    if not files:
        raise UserError(f"{place} must hold files whose names end in {' or '.join(suffixes)}")
    return [kind(file) for file in files]


def open_parts(
    folder: PathLike, suffixes: tuple[str, ...], kind: Callable[[Path], File]
) -> tuple[list[File], list[File]]:
    """The files of a folder to train on, and those to test on.

    Raises:
        UserError: there are not both, or it is in doubt which they are.
    """
    place = checked_path("folder", folder)
    parts = parts_in(place, suffixes)
    if parts is None:
        raise UserError(f"{place} must hold {' or '.join(suffixes)} files of {REQUIRED}")
    train, test = (
        [kind(file) for path in paths for file in _files(path, suffixes)]
        for paths in (parts.train, parts.test)
    )
    return train, test
