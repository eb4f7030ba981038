"""Parquet and Arrow files, and folders of them, as data sets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import reason
from ..validation import checked_path
from .column_files import ArrowFile, ColumnFile, ParquetFile
from .columns import MOST_BYTES, Columns, Names

PARQUET, ARROW = (".parquet",), (".arrow", ".feather")
TRAINING, TESTING = "train", ("test", "val")  #: what the names of parts begin with

PathLike = str | os.PathLike[str]


def load_parquet(
    path: PathLike,
    *,
    x: Names | None = None,
    y: Names | None = None,
    most_bytes: int = MOST_BYTES,
) -> Columns:
    """Columns of a Parquet file, or of all ``.parquet`` files of a folder by their sorted names.

    Args:
        path: of the file or the folder (not what is below it).
        x, y, most_bytes: as for `Columns`, which says what is read when, and what is refused.
    Raises:
        UserError: as for `Columns`, or pyarrow is missing, or a file is missing or malformed.

    Local: now, every rank reads the foot of each file.
    """
    return Columns(_opened(path, PARQUET, ParquetFile), x=x, y=y, most_bytes=most_bytes)


def load_arrow(
    path: PathLike,
    *,
    x: Names | None = None,
    y: Names | None = None,
    most_bytes: int = MOST_BYTES,
) -> Columns:
    """As `load_parquet`, of Arrow files (``.arrow``, ``.feather`` of version 2): record batches are
    the groups, and now one column of numbers is read, to see how many rows each has."""
    return Columns(_opened(path, ARROW, ArrowFile), x=x, y=y, most_bytes=most_bytes)


def parquet_parts(
    folder: PathLike,
    *,
    x: Names | None = None,
    y: Names | None = None,
    most_bytes: int = MOST_BYTES,
) -> tuple[Columns, Columns]:
    """Parquet files of a folder whose names begin with "train", and with "test" or "val", as
    (training, test); also those in its folders ``train/`` and ``test/`` or ``val/``.

    Args:
        x, y, most_bytes: as for `Columns`; `most_bytes` is for each of the two.
    Raises:
        UserError: as for `load_parquet`, one of the two is missing, or the folder holds both "test"
            and "val", or other files of columns.

    Local.
    """
    train, test = _parts(folder, PARQUET, ParquetFile)
    options: dict[str, Any] = {"x": x, "y": y, "most_bytes": most_bytes}
    return Columns(train, **options), Columns(test, **options)


def arrow_parts(
    folder: PathLike,
    *,
    x: Names | None = None,
    y: Names | None = None,
    most_bytes: int = MOST_BYTES,
) -> tuple[Columns, Columns]:
    """As `parquet_parts`, of Arrow files."""
    train, test = _parts(folder, ARROW, ArrowFile)
    options: dict[str, Any] = {"x": x, "y": y, "most_bytes": most_bytes}
    return Columns(train, **options), Columns(test, **options)


def is_parquet(path: Path) -> bool:
    """Whether a path is named as a Parquet file, or is a folder that holds some. Local."""
    return path.suffix.lower() in PARQUET or any(_found(path, PARQUET).values())


def is_arrow(path: Path) -> bool:
    """Whether a path is named as an Arrow file, or is a folder that holds some. Local."""
    return path.suffix.lower() in ARROW or any(_found(path, ARROW).values())


def has_parquet_parts(path: Path) -> bool:
    """Whether a folder of Parquet files is cut into training and test. Local."""
    return _has_parts(_found(path, PARQUET))


def has_arrow_parts(path: Path) -> bool:
    """Whether a folder of Arrow files is cut into training and test. Local."""
    return _has_parts(_found(path, ARROW))


def _has_parts(found: dict[str, list[Path]]) -> bool:
    return bool(found[TRAINING]) and any(found[name] for name in TESTING)


def _found(folder: Path, suffixes: tuple[str, ...]) -> dict[str, list[Path]]:
    """The files of a folder by the part that they are of, "" for none, in the order of their names;
    none where it cannot be read."""
    found: dict[str, list[Path]] = {name: [] for name in (TRAINING, *TESTING, "")}
    for path in _listed(folder):
        if path.name in found and path.is_dir():
            found[path.name] += [file for file in _listed(path) if _is_data(file, suffixes)]
        elif _is_data(path, suffixes):
            part = next(name for name in found if path.name.lower().startswith(name))
            found[part].append(path)
    return found


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # of which its reader tells
        return []


def _is_data(path: Path, suffixes: tuple[str, ...]) -> bool:
    return path.suffix.lower() in suffixes and not path.name.startswith((".", "_"))


def _opened(
    path: PathLike, suffixes: tuple[str, ...], kind: Callable[[Path], ColumnFile]
) -> list[ColumnFile]:
    """The file that a path leads to, or those of the folder."""
    place = checked_path("path", path, "file")
    if not place.is_dir():
        return [kind(place)]
    try:
        files = [file for file in sorted(place.iterdir()) if _is_data(file, suffixes)]
    except OSError as error:
        raise UserError(f"{place} cannot be read: {reason(error)}") from None
    if not files:
        raise UserError(f"{place} must hold files whose names end in {' or '.join(suffixes)}")
    return [kind(file) for file in files]


def _parts(
    folder: PathLike, suffixes: tuple[str, ...], kind: Callable[[Path], ColumnFile]
) -> tuple[list[ColumnFile], list[ColumnFile]]:
    """The files to train on, and those to test on."""
    place = checked_path("folder", folder)
    found = _found(place, suffixes)
    testing = [name for name in TESTING if found[name]]
    if not found[TRAINING] or len(testing) != 1 or found[""]:
        held = [name or found[""][0].name for name, files in found.items() if files]
        raise UserError(
            f"{place} must hold files of {' or '.join(TESTING)} beside those of {TRAINING}, and no "
            f"others: it holds {', '.join(held) or 'none'}"
        )
    return [kind(file) for file in found[TRAINING]], [kind(file) for file in found[testing[0]]]
