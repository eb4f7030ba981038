"""CSV files, and folders of CSV files, as data sets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...validation import require_use, shown
from ..dataset import Arrays
from ..validation import Array
from .column_names import checked_names, default_x, default_y
from .columns import Names
from .csv_file import CSVFile, Target, numbers_of
from .parts import named
from .tables import PathLike, entries_of, listed, open_files, open_parts

CSV = (".csv", ".tsv", ".csv.gz", ".tsv.gz")

Columns = int | Sequence[int] | Names


class CSVTable(Arrays):
    """The rows of CSV files, in memory; made by `load_csv`.

    Attributes:
        x_columns, y_columns: the names of the columns.
        names: of the classes, by label, if y holds names; else None.
    """

    def __init__(
        self,
        files: Sequence[CSVFile],
        *,
        x: Columns | None = None,
        y: Columns | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        first = files[0]
        self.y_columns = (
            default_y(first) if y is None else checked_names("y", _names_of(first, y), first)
        )
        self.x_columns = (
            default_x(first, self.y_columns)
            if x is None
            else checked_names("x", _names_of(first, x), first)
        )
        for file in files[1:]:
            checked_names("y", self.y_columns, file)
            checked_names("x", self.x_columns, file)
        alone = isinstance(y, str | int | None)
        require_use("names", names, None, alone, "a single column as y")
        target = Target(self.y_columns[0], names) if alone else None
        wanted = self.x_columns if alone else (*self.x_columns, *self.y_columns)
        parts: list[list[Array]] = [[np.empty(0, np.int64)] for _ in wanted]
        for file in files:
            for lines, columns in file.blocks((*wanted, *(self.y_columns if alone else ()))):
                if target is not None:
                    target.add(file, lines, columns.pop())
                for part, name, cells in zip(parts, wanted, columns, strict=True):
                    part.append(numbers_of(file, name, lines, cells))
        arrays = [np.concatenate(part) for part in parts]
        features = len(self.x_columns)
        y_values = np.stack(arrays[features:], axis=1) if target is None else target.values()
        several = f"{first.path.parent}" if files[1:] else str(first.path)
        super().__init__(np.stack(arrays[:features], axis=1), y_values, name=several)
        self.names = None if target is None else target.names
        self.classes = None if self.names is None else len(self.names)

    def __repr__(self) -> str:
        place = self.x_name.removesuffix(": x")
        classes = "" if self.names is None else f", {len(self.names)} classes"
        return (
            f"CSVTable({place}, {len(self)} samples, x={shown(self.x_columns)}, "
            f"y={shown(self.y_columns)}{classes})"
        )


def load_csv(
    path: PathLike,
    *,
    x: Columns | None = None,
    y: Columns | None = None,
    names: Sequence[str] | None = None,
    delimiter: str | None = None,
    header: bool | None = None,
) -> CSVTable:
    """Read columns of a CSV file, or of all ``.csv`` and ``.tsv`` files of a folder by their names.

    Args:
        path: of the file, possibly compressed (``.csv.gz``), or of a folder that is not split into
            training and test files.
        x: the names of numeric (or true/false) columns, which become [n, k] in this order. None:
            the column "x" if there is one; else all columns except y, and except a nameless first
            column of row names as written by pandas and R.
        y: the name of a column: whole numbers become int64 [n], other numbers float64, and names
            labels of classes. Or a list of names of numeric columns: [n, k]. None: the first of
            "y", "label" and "target" that exists.
        names: of the classes, by label, if y holds names. None: the names found, sorted.
        delimiter, header: as for `CSVFile`. Without a header, x and y are numbers of columns, from
            0, or from -1 backwards.
    Returns:
        The data set: x int64 if all values are whole numbers, else float64; converted as it is
            read.
    Raises:
        UserError: an argument is not as required, a column does not exist, a cell is missing or no
            number, a row has another number of cells, or the file is missing, malformed, or not in
            UTF-8. The message names the line.

    Local. Cost: every rank reads the whole file, a million cells a second. Store larger data as
    Parquet.
    """
    kind = partial(CSVFile, delimiter=delimiter, header=header)
    return CSVTable(open_files(path, CSV, kind), x=x, y=y, names=names)


def csv_parts(
    folder: PathLike,
    *,
    x: Columns | None = None,
    y: Columns | None = None,
    delimiter: str | None = None,
    header: bool | None = None,
) -> tuple[CSVTable, CSVTable]:
    """Read CSV files of a folder as (training, test), by their names as for `parquet_parts`.

    Args:
        folder: contains the files.
        x, y, delimiter, header: as for `load_csv`. The test data use the columns and the classes of
            the training data.
    Raises:
        UserError: as for `load_csv` and `parquet_parts`.

    Local.
    """
    kind = partial(CSVFile, delimiter=delimiter, header=header)
    training, testing = open_parts(folder, CSV, kind)
    train = CSVTable(training, x=x, y=y)
    of_y: Any = train.y_columns[0] if isinstance(y, str | int | None) else train.y_columns
    return train, CSVTable(testing, x=train.x_columns, y=of_y, names=train.names)


def is_csv(path: Path) -> bool:
    """Return True for a CSV file's name, or a folder of CSV files with no folders except CSV parts.

    A folder of images may contain some CSV files, too: this is not a CSV folder. Local.
    """
    if not path.is_dir():
        return path.name.lower().endswith(CSV)
    entries = entries_of(path, CSV)
    folders = [entry for entry in listed(path) if entry.is_dir()]
    return bool(entries) and all(
        entry in entries
        and named(entry.name).kind
        and not any(below.is_dir() for below in listed(entry))
        for entry in folders
    )


def _names_of(file: CSVFile, columns: Columns) -> Any:
    """Convert numbers of columns to their names; anything else is returned as given."""
    if isinstance(columns, str) or not isinstance(columns, int | list | tuple):
        return columns
    whole = [columns] if isinstance(columns, int) else columns
    return [_name(file, one) if type(one) is int else one for one in whole]


def _name(file: CSVFile, place: int) -> str:
    if file.header is False and -len(file.columns) <= place < 0:
        place += len(file.columns)
    return str(place)
