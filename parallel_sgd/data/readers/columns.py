"""Data sets in columns of Parquet and Arrow files, decoded by groups of rows on demand."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from threading import Lock
from typing import Any

import numpy as np

from ...errors import UserError
from ...validation import integer, require_memory, shown
from ..dataset import Dataset
from ..validation import Array, DType, checked_inputs, checked_targets, float_dtype
from .column_files import ColumnFile
from .column_names import checked_names, default_x, default_y

MOST_BYTES = 1 << 30

Names = str | Sequence[str]
Pair = tuple[Array, Array]


class Columns(Dataset):
    """Rows of column files with x [n, k] and y [n] or [n, k] in columns.

    If all decoded columns fit into `most_bytes`, each group of rows is decoded once, when first
    needed, and kept; samples are shuffled among all groups. Otherwise as many groups are kept as
    fit. A shuffled epoch of a `Source` then takes so many groups at a time, in a random order, and
    the samples of these groups in a random order: each group is decoded about once an epoch, on
    about one rank. (A group is always decoded whole, even if a single group is larger than
    `most_bytes`. Without `shuffle` every rank decodes all groups. Reading samples in a different
    random order, as a PyTorch `DataLoader` does without our sampler, decodes a group for almost
    every sample.)

    Args:
        files: at least one, with the same columns; the rows of the files are concatenated.
        x: the names of numeric columns, which become [n, k] in this order; or the name of a single
            column, of numbers ([n, 1]) or of lists of equal lengths ([n, k]). None: the column "x"
            if there is one, else all columns except y and pandas' index columns.
        y: likewise; a single column of numbers gives [n]. None: the first of "y", "label" and
            "target" that exists.
        most_bytes: limit on decoded columns in memory on this rank; the same on all ranks.
    Attributes:
        x_columns, y_columns: the names of the columns.
    Raises:
        UserError: a column is missing or not numeric, or the files' columns differ. While reading:
            a missing value (null), a list of another length, or a damaged file, named by file and
            row; and as for `Dataset.read`.

    Several columns are kept in their common NumPy type until read. Local. Threads may share this.
    """

    def __init__(
        self,
        files: Sequence[ColumnFile],
        *,
        x: Names | None = None,
        y: Names | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        if not files:
            raise UserError("files=[] must be at least one file")
        self.files = tuple(files)
        self.most_bytes = integer("most_bytes", most_bytes, 1)
        first = self.files[0]
        self.y_columns = default_y(first) if y is None else checked_names("y", y, first)
        self.x_columns = (
            default_x(first, self.y_columns) if x is None else checked_names("x", x, first)
        )
        for file in self.files[1:]:
            self._require_equal(file)
        self._groups = [(file, group) for file in self.files for group in range(len(file.rows))]
        rows = [file.rows[group] for file, group in self._groups]
        self._ends = np.array(list(accumulate(rows)), np.int64)
        self._lock = Lock()  # a data set may be shared by ranks that are threads
        self._empty_pair = (
            self._empty(self.x_columns),
            self._empty(self.y_columns, vector=isinstance(y, str | None)),
        )
        bytes_a_row = sum(a.itemsize * math.prod(a.shape[1:]) for a in self._empty_pair)
        self._fits = bytes_a_row * len(self) <= self.most_bytes
        if self._fits:
            require_memory(repr(self), bytes_a_row * len(self))
        self._all: Pair | None = None  #: all samples, if they fit
        self._kept: OrderedDict[int, Pair] = OrderedDict()  #: groups, least recently used first
        largest = bytes_a_row * max(rows, default=0)
        self.open_groups = max(self.most_bytes // max(largest, 1), 1)
        self.repeatable = self._fits
        several = self.files[1:]
        self.y_name = f"{first.path.parent if several else first.path}: y"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which decodes the groups of its samples itself."""
        return self.__dict__ | {"_lock": None, "_all": None, "_kept": OrderedDict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = Lock()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def groups(self, indexes: Array) -> Array | None:
        """Return the group of each sample; None if all samples fit into memory, in any order."""
        return None if self._fits else self._ends.searchsorted(indexes, side="right")

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        kind = float_dtype(dtype)
        indexes = np.asarray(indexes)
        stored = self._gathered(indexes)
        try:
            return self._checked(self.y_name, stored, indexes, kind, classes)
        except UserError:
            self._raise_with_row(stored, indexes, kind, classes)
            raise

    def targets(self, indexes: Array) -> Array:
        y = np.empty((len(indexes), *self._empty_pair[1].shape[1:]), self._empty_pair[1].dtype)
        for number, places, rows in self._where(np.asarray(indexes)):
            with self._lock:
                kept = self._kept.get(number)
            stored = kept[1] if kept else self._stored(number, self.y_columns)[0]
            y[places] = stored[rows]
        return y

    def _gathered(self, indexes: Array) -> Pair:
        """Return the samples as stored, [m, …]."""
        if self._fits:
            x, y = self._all_with(indexes)
            return x[indexes], y[indexes]
        x, y = (np.empty((len(indexes), *a.shape[1:]), a.dtype) for a in self._empty_pair)
        for number, places, rows in self._where(indexes):
            group = self._decoded(number)
            x[places], y[places] = group[0][rows], group[1][rows]
        return x, y

    def _all_with(self, indexes: Array) -> Pair:
        """Return arrays of all samples, with at least the groups of these indexes decoded."""
        with self._lock:
            if self._all is None:
                shapes = ((len(self), *a.shape[1:]) for a in self._empty_pair)
                x, y = map(np.empty, shapes, (a.dtype for a in self._empty_pair))
                self._all = x, y
            if len(self._kept) < len(self._groups):
                for number in np.unique(self._ends.searchsorted(indexes, side="right")).tolist():
                    if number in self._kept:
                        continue
                    part = slice(self._begin(number), int(self._ends[number]))
                    self._all[0][part], self._all[1][part] = self._stored(
                        number, self.x_columns, self.y_columns
                    )
                    self._kept[number] = self._all[0][part], self._all[1][part]
            return self._all

    def _decoded(self, number: int) -> Pair:
        """Return x and y of a group, as stored; decode the group unless it is kept."""
        with self._lock:
            if number not in self._kept:
                x, y = self._stored(number, self.x_columns, self.y_columns)
                while len(self._kept) >= self.open_groups:
                    self._kept.popitem(last=False)
                self._kept[number] = x, y
            self._kept.move_to_end(number)
            return self._kept[number]

    def _where(self, indexes: Array) -> Iterator[tuple[int, Array, Array]]:
        """Yield (number, places in the minibatch, rows in the group) of each needed group.

        Groups come in the order in which the indexes first refer to them.
        """
        numbers = self._ends.searchsorted(indexes, side="right")
        distinct, firsts = np.unique(numbers, return_index=True)
        for number in distinct[np.argsort(firsts)].tolist():
            places = np.flatnonzero(numbers == number)
            yield number, places, indexes[places] - self._begin(number)

    def _begin(self, number: int) -> int:
        file, group = self._groups[number]
        return int(self._ends[number]) - file.rows[group]

    def _checked(
        self,
        y_name: str,
        stored: Pair,
        indexes: Array,
        kind: np.dtype[Any] | None,
        classes: int | None,
    ) -> Pair:
        x = checked_inputs(f"{y_name[:-1]}x", stored[0], indexes, kind)
        return x, checked_targets(y_name, stored[1], indexes, kind, classes)

    def _raise_with_row(
        self, stored: Pair, indexes: Array, kind: np.dtype[Any] | None, classes: int | None
    ) -> None:
        """Raise the error of a bad sample, with its file and its row in the file."""
        for number, places, rows in self._where(indexes):
            file, group = self._groups[number]
            some = stored[0][places], stored[1][places]
            rows_there = rows + file.first_row(group)
            self._checked(f"{file.path}: y", some, rows_there, kind, classes)

    def _stored(self, number: int, *columns: tuple[str, ...]) -> list[Array]:
        """Return x or y of a group, or both, given their columns; as stored."""
        file, group = self._groups[number]
        arrays = iter(file.read(group, [name for names in columns for name in names]))
        stored = []
        for names in columns:
            like = self._empty_pair[names is self.y_columns]
            own = [next(arrays) for _ in names]
            rows = own[0] if len(own) == 1 else np.stack(own, axis=1)
            if rows.ndim < like.ndim:
                rows = rows[:, np.newaxis]
            if rows.shape[1:] != like.shape[1:] and len(rows):
                raise UserError(
                    f"{file.path}: column {names[0]!r} has lists of {rows.shape[1]} values from "
                    f"row {file.first_row(group)}: must be {like.shape[1]}, as in the first group"
                )
            stored.append(rows.astype(like.dtype, copy=False))
        return stored

    def _empty(self, names: Sequence[str], *, vector: bool = False) -> Array:
        """Return the array of some columns for no rows.

        Reads a group if the file does not declare the length of lists.
        """
        kinds = [self.files[0].kinds[name] for name in names]
        dtype = np.result_type(*(dtype for dtype, _ in kinds))
        width = kinds[0][1]
        if width is None:
            return np.empty((0,) if vector and len(names) == 1 else (0, len(names)), dtype)
        filled = [(file, group) for file, group in self._groups if file.rows[group]]
        if width == 0 and filled:
            file, group = filled[0]
            width = file.read(group, names)[0].shape[1]
        return np.empty((0, width), dtype)

    def _require_equal(self, file: ColumnFile) -> None:
        first = self.files[0]
        for name in (*self.x_columns, *self.y_columns):
            if file.types.get(name) != first.types[name]:
                raise UserError(
                    f"{file.path}: column {name!r} holds {file.types.get(name, 'nothing')}: must "
                    f"be {first.types[name]}, as in {first.path}"
                )

    def __repr__(self) -> str:
        first, *more = (str(file.path) for file in self.files)
        files = f"{first} … {more[-1]}, {len(self.files)} files" if more else first
        columns = f"x={shown(self.x_columns)}, y={shown(self.y_columns)}"
        return f"Columns({files}, {len(self)} samples, {columns})"
