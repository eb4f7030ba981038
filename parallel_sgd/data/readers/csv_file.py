"""CSV files as tables: a header, columns of numbers, and a target of numbers or class names."""

from __future__ import annotations

import csv
import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...errors import UserError
from ...files import opened, reason
from ...validation import choice, line_of, shown
from ..unchanged import Identity, identity_of, reopened
from ..validation import Array
from .column_files import ROW_NAMES

ROWS = 1 << 14  #: rows converted at a time
MISSING = {"", "na", "n/a", "nan", "null", "?"}  #: cells without a value
TRUTH = {"true": 1, "false": 0}

Row = tuple[int, list[str]]  #: the line number at the row's end, from 1, and its cells


class CSVFile:
    """A text file of rows with a delimiter between cells; the first row names the columns.

    Args:
        path: of the file; a file whose name ends in ``.gz`` is decompressed while reading.
        delimiter: a single character; None: a tab if the name ends in ``.tsv``, else a comma.
        header: True: the first row names the columns. False: the first row holds data, and columns
            are named by their place, "0" and so on. None: as True, but a first row of numbers is
            refused.
    Attributes:
        columns: the names of all columns.
        kinds, types, indexes: as for `ColumnFile`.
    Raises:
        UserError: an argument is not as required, or the file is missing, empty, or malformed.

    The constructor reads only the first row. Local.
    """

    def __init__(self, path: Path, *, delimiter: str | None = None, header: bool | None = None):
        self.path, self.header = path, choice("header", header, (True, False, None))
        tabs = path.name.lower().endswith((".tsv", ".tsv.gz"))
        self.delimiter = ("\t" if tabs else ",") if delimiter is None else delimiter
        if not isinstance(delimiter, str | None) or len(self.delimiter) != 1:
            raise UserError(f"delimiter={shown(delimiter)} must be one character")
        if self.delimiter in '"\r\n\0':
            raise UserError(f"delimiter={shown(delimiter)} must not be a quote or an end of a line")
        self._before: Identity | None = None
        with self._rows() as rows:
            _, first = next(rows, (1, []))
        self.columns = tuple(cell.strip() for cell in first)
        if not any(self.columns):
            raise UserError(f"{path} must begin with the names of its columns: it is empty")
        if len(first) == 1 and delimiter is None:
            found = next((sign for sign in (";", "\t", "|", ",") if sign in first[0]), None)
            if found:
                raise UserError(
                    f"{path} has one column, {shown(first[0])}: give delimiter={found!r}, if that "
                    "separates columns"
                )
        if self.header is None and all(map(_is_number, self.columns)):
            raise UserError(
                f"{path} must begin with the names of its columns: it begins with "
                f"{shown(list(self.columns))}; give header=False if the file has no names, "
                "or header=True if these are names"
            )
        if self.header is False:
            self.columns = tuple(map(str, range(len(first))))
        once = [name for name in self.columns if self.columns.count(name) == 1]
        self.kinds = {name: (np.dtype(np.float64), None) for name in once}
        self.types = dict.fromkeys(self.columns, "text")
        self.indexes = frozenset(self.columns[:1]) & ROW_NAMES

    def blocks(self, names: Sequence[str]) -> Iterator[tuple[list[int], list[tuple[str, ...]]]]:
        """Yield the cells of some columns, in blocks of rows.

        Yields:
            The line number at the end of each row, and the cells of each column.
        Raises:
            UserError: a row has more or fewer cells than the first, or the file is malformed.
        """
        places, width = [self.columns.index(name) for name in names], len(self.columns)
        with self._rows() as rows:
            if self.header is not False:
                next(rows, None)
            while block := [*islice(rows, ROWS)]:
                for line, cells in block:
                    if len(cells) != width:
                        raise self.error_at(
                            line, f"{len(cells)} cells: must be {width}, as in line 1"
                        )
                columns = [*zip(*(cells for _, cells in block), strict=True)]
                yield [line for line, _ in block], [columns[place] for place in places]

    def error_at(self, line: int, problem: str) -> UserError:
        return UserError(f"{self.path}, line {line}: {problem}")

    def _file(self) -> IO[bytes]:
        """Open the file; raise a UserError if it has changed since it was first opened."""
        if self._before is not None:
            return reopened(str(self.path), self.path, self._before)
        file = opened(str(self.path), self.path)
        self._before = identity_of(os.fstat(file.fileno()))
        return file

    @contextmanager
    def _rows(self) -> Iterator[Iterator[Row]]:
        """Return the rows, without blank lines; convert errors of the file to a UserError."""
        line = 0

        def numbered(reader: Any) -> Iterator[Row]:
            nonlocal line
            for cells in reader:
                line = reader.line_num
                if cells:
                    yield line, cells

        with self._file() as file:
            try:
                plain = gzip.GzipFile(fileobj=file) if _is_gz(self.path) else file
                text = io.TextIOWrapper(plain, encoding="utf-8-sig", newline="")
                yield numbered(csv.reader(text, delimiter=self.delimiter, strict=True))
            except (csv.Error, UnicodeError) as error:
                raise UserError(
                    f"{self.path} is not a well-formed CSV file in UTF-8, after line {line}: "
                    f"{line_of(error)}"
                ) from None
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                problem = f"{self.path} is not a well-formed gzip file: {line_of(error)}"
                raise UserError(problem) from None
            except OSError as error:
                raise UserError(f"{self.path} cannot be read: {reason(error)}") from None


def numbers_of(file: CSVFile, name: str, lines: list[int], cells: Sequence[str]) -> Array:
    """Convert cells to int64 if all are whole numbers (or all are true and false), else to float64.

    Args:
        file, name, lines: file, column and line numbers, for errors.
    Raises:
        UserError: a cell is missing, or no number; the message names the line.
    """
    numbers = _numbers(cells)
    if numbers is None:
        for line, cell in zip(lines, cells, strict=True):
            if is_missing(cell):
                held = f"is missing ({cell!r})" if cell else "is missing"
                raise file.error_at(line, f"column {name!r} {held}: must be a number")
            if not _is_number(cell):
                problem = f"column {name!r} is {shown(cell)}: must be a number"
                raise file.error_at(line, f"{problem}, or the column excluded by x=")
        raise AssertionError("all cells are numbers")
    return numbers


class Target:
    """The cells of a single column of several files: numbers, or names of classes.

    Args:
        name: of the column.
        names: of the classes, in the order of their labels; None: all names found, sorted.
    Raises:
        UserError: `names` is not a list of texts.
    """

    def __init__(self, name: str, names: Sequence[str] | None) -> None:
        given = () if names is None else names
        listed = isinstance(given, Iterable) and not isinstance(given, str)
        if not listed or not all(isinstance(one, str) for one in given):
            raise UserError(f"names={shown(names)} must be a list of names of classes")
        self.name, self.names = name, None if names is None else tuple(names)
        self._distinct: dict[str, int] = {}  #: distinct cells and their numbers
        self._firsts: list[tuple[CSVFile, int]] = []  #: first place of each cell
        self._found: list[Array] = []

    def add(self, file: CSVFile, lines: list[int], cells: Sequence[str]) -> None:
        """Add some more cells; raise a UserError if a cell is missing."""
        known, found = self._distinct, np.empty(len(cells), np.int64)
        for row, cell in enumerate(cells):
            place = known.setdefault(cell, len(known))
            if place == len(self._firsts):
                self._firsts.append((file, lines[row]))
                if is_missing(cell):
                    held = f"is missing ({cell!r})" if cell else "is missing"
                    raise file.error_at(lines[row], f"column {self.name!r} {held}")
            found[row] = place
        self._found.append(found)

    def values(self) -> Array:
        """Return y [n]: numbers as int64 or float64; class names as int64 indexes in `names`.

        Raises:
            UserError: cells mix numbers and names, or a cell is not among the given names.
        """
        cells = [cell.strip() for cell in self._distinct]
        values = None if self.names is not None else _numbers(cells)
        if values is None:
            values = self._labels(cells)
        places = np.concatenate([np.empty(0, np.int64), *self._found])
        y: Array = values[places]
        return y

    def _labels(self, cells: list[str]) -> Array:
        if self.names is None:
            numbers = [_is_number(cell) for cell in cells]
            if any(numbers):
                other = numbers.index(False)
                file, line = self._firsts[other]
                raise file.error_at(
                    line,
                    f"column {self.name!r} is {shown(cells[other])}: must be a number, as "
                    f"{shown(cells[numbers.index(True)])} is, or all cells must be names",
                )
            self.names = tuple(sorted(set(cells)))
        labels = {name: label for label, name in enumerate(self.names)}
        for (file, line), cell in zip(self._firsts, cells, strict=True):
            if cell not in labels:
                known = shown(list(self.names))
                raise file.error_at(
                    line, f"column {self.name!r} is {shown(cell)}: must be one of {known}"
                )
        return np.array([labels[cell] for cell in cells], np.int64)


def is_missing(cell: str) -> bool:
    """Return True if a cell stands for a missing value."""
    return cell.strip().lower() in MISSING


def _numbers(cells: Sequence[str]) -> Array | None:
    """Convert cells to int64 or float64; return None if a cell is no number."""
    if "_" in "".join(cells):  # Python accepts "_" in numbers
        return None
    try:
        return np.array([*map(int, cells)], np.int64)
    except (ValueError, OverflowError):
        pass
    try:
        floats = np.array([*map(float, cells)], np.float64)
        return None if np.isnan(floats).any() else floats
    except ValueError:
        pass
    try:
        return np.array([TRUTH[cell.strip().lower()] for cell in cells], np.int64)
    except KeyError:
        return None


def _is_number(cell: str) -> bool:
    numbers = _numbers([cell])
    return numbers is not None and cell.strip().lower() not in TRUTH


def _is_gz(path: Path) -> bool:
    return path.suffix.lower() == ".gz"
