"""Parquet and Arrow files, and folders of such files, as data sets."""

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
from .parts import REQUIRED, Parts, both_parts_problem, is_system_file, parts_of

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
    """Open columns of a Parquet file, or of all ``.parquet`` files of a folder sorted by name.

    Args:
        path: of the file, or of a folder (without its subfolders) that is not split into training
            and test files.
        x, y, most_bytes: as for `Columns`; see there for times of reading, and for errors.
    Raises:
        UserError: as for `Columns`; or pyarrow is missing, or a file is missing or malformed.

    Local. Cost: every rank reads the footer of each file now.
    """
    return Columns(open_files(path, PARQUET, ParquetFile), x=x, y=y, most_bytes=most_bytes)


def load_arrow(
    path: PathLike,
    *,
    x: Names | None = None,
    y: Names | None = None,
    most_bytes: int = MOST_BYTES,
) -> Columns:
    """Open columns of Arrow files as `load_parquet` does (``.arrow``, ``.feather`` of version 2).

    The groups are the record batches. A numeric column is read now, to count the rows of each.
    """
    return Columns(open_files(path, ARROW, ArrowFile), x=x, y=y, most_bytes=most_bytes)


def parquet_parts(
    folder: PathLike,
    *,
    x: Names | None = None,
    y: Names | None = None,
    most_bytes: int = MOST_BYTES,
) -> tuple[Columns, Columns]:
    """Open Parquet files of a folder as (training, test), by words in names of files and folders.

    The words are ``train``, ``training``; and ``test``, ``testing``, ``holdout``, or else ``val``,
    ``valid``, ``validation``, ``dev``, ``eval``. If there are both test and validation files, the
    validation files are skipped.

    Args:
        folder: contains the files.
        x, y, most_bytes: as for `Columns`; `most_bytes` is for each of the two. The test data use
            the columns of the training data.
    Raises:
        UserError: as for `load_parquet`; a part is missing; or the folder holds further data files,
            or several words of the same kind.

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
    """Open Arrow files of a folder as (training, test); as `parquet_parts`."""
    return _both(*open_parts(folder, ARROW, ArrowFile), x=x, y=y, most_bytes=most_bytes)


def _both(
    train: Sequence[ColumnFile],
    test: Sequence[ColumnFile],
    *,
    x: Names | None,
    y: Names | None,
    most_bytes: int,
) -> tuple[Columns, Columns]:
    """Open two data sets with the same columns in the same order, whatever the files' order."""
    training = Columns(train, x=x, y=y, most_bytes=most_bytes)
    of_y = training.y_columns[0] if y is None else y
    return training, Columns(test, x=training.x_columns, y=of_y, most_bytes=most_bytes)


def is_table(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return True for a path named as a table, or a folder with such files. Local."""
    return path.suffix.lower() in suffixes or bool(entries_of(path, suffixes))


def parts_in(folder: Path, suffixes: tuple[str, ...]) -> Parts | None:
    """Return the parts of a folder of files, and raise errors, as `parts_of`. Local."""
    return parts_of(folder, entries_of(folder, suffixes))


def entries_of(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return a folder's data files and subfolders with data files; none if unreadable."""
    return [
        path
        for path in listed(folder)
        if _is_data(path, suffixes) or (path.is_dir() and _files(path, suffixes))
    ]


def _files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return a file, or the data files of a folder in the order of their names."""
    if not path.is_dir():
        return [path]
    return [file for file in listed(path) if _is_data(file, suffixes)]


def listed(folder: Path) -> list[Path]:
    """Return a folder's files and folders without system files; none if it cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if not is_system_file(path.name))
    except OSError:  # reported when the folder is read
        return []


def _is_data(path: Path, suffixes: tuple[str, ...]) -> bool:
    name = path.name.lower()
    return name.endswith(suffixes) and not name.startswith((".", "_")) and not path.is_dir()


def open_files(
    path: PathLike, suffixes: tuple[str, ...], kind: Callable[[Path], File]
) -> list[File]:
    """Open a file, or all data files of a folder.

    Raises:
        UserError: there is no file, or the folder is split into training and test.
    """
    place = checked_path("path", path, "file")
    if not place.is_dir():
        return [kind(place)]
    try:
        os.scandir(place).close()
    except OSError as error:
        raise UserError(f"{place} cannot be read: {reason(error)}") from None
    if parts_in(place, suffixes) is not None:
        raise UserError(both_parts_problem(place))
    files = _files(place, suffixes)
    if not files:
        raise UserError(f"{place} must hold files whose names end in {' or '.join(suffixes)}")
    return [kind(file) for file in files]


def open_parts(
    folder: PathLike, suffixes: tuple[str, ...], kind: Callable[[Path], File]
) -> tuple[list[File], list[File]]:
    """Open the training files and the test files of a folder.

    Raises:
        UserError: a part is missing, or the names leave doubt about the parts.
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
