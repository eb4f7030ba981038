"""Parquet and Arrow files by pyarrow: groups of rows, and columns of a group as arrays."""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError
from ...files import opened
from ...validation import NUMBERS, line_of
from ..unchanged import identity_of, reopened
from ..validation import Array

MOST_ROWS = 1 << 48  #: rows of a file, at most
#: Names given by pandas and Dask to an index without a name.
INDEX = re.compile(r"__index_level_\d+__|__null_dask_index__")
ROW_NAMES = {"", "Unnamed: 0"}  #: names of a first column of row names
EXTRA = "pip install '.[arrow]' from the checkout"


class ColumnFile(ABC):
    """A file whose rows come in groups; a group is decoded as a whole.

    Args:
        path: of a regular file.
    Attributes:
        kinds: for each numeric column (dtype, width). The width is None for a number in each row,
            and k for a list of k numbers; 0 for lists whose length the file does not declare.
        columns: the names of all columns.
        indexes: the columns that are a DataFrame's index (pandas stores an index as columns).
        rows: number of rows of each group.
        types: pyarrow's type of each column, as text.
    Raises:
        UserError: pyarrow is missing, or the file is missing, not readable, or malformed.

    The constructor reads only the header or footer of the file. Local.
    """

    format: str

    def __init__(self, path: Path) -> None:
        self.path = path
        require_pyarrow(self.format)
        with opened(str(path), path) as file, self._as_user_error():
            self._before = identity_of(os.fstat(file.fileno()))
            schema, self.rows = self._opened(file)
            names = list(schema.names)
            self.indexes = _indexes(names, schema.metadata or {})
            self.columns = tuple(names)
            self.kinds = {
                name: kind
                for name, type_ in zip(names, schema.types, strict=True)
                if (kind := _kind_of(type_)) is not None and names.count(name) == 1
            }
            self.types = {name: str(type_) for name, type_ in zip(names, schema.types, strict=True)}
        if min(self.rows, default=0) < 0 or sum(self.rows) > MOST_ROWS:
            raise UserError(f"{path} is not a well-formed {self.format} file: rows {self.rows}")

    @abstractmethod
    def _opened(self, file: Any) -> tuple[Any, list[int]]:
        """Return the schema of an open file, and the number of rows of each group."""

    @abstractmethod
    def _read(self, file: Any, group: int, columns: list[str]) -> Any:
        """Read some columns of a group, as a pyarrow table or batch."""

    def read(self, group: int, columns: Sequence[str]) -> list[Array]:
        """Read columns of a group of rows.

        Args:
            group: number of the group, from 0.
            columns: names in `kinds`.
        Returns:
            For each column an array [rows] or [rows, k], as stored; read-only.
        Raises:
            UserError: the file is malformed or has changed; a value is missing (null), named by its
                row in the file, from 0; or a list has another length than the first.

        Local. Cost: reads and decodes these columns of the group.
        """
        with reopened(str(self.path), self.path, self._before) as file:
            with self._as_user_error():
                table = self._read(file, group, list(dict.fromkeys(columns)))
                table.validate(full=True)
            if table.num_rows != self.rows[group]:
                raise UserError(
                    f"{self.path} is not a well-formed {self.format} file: group {group} has "
                    f"{table.num_rows} rows: must be {self.rows[group]}"
                )
            return [self._array(table.column(name), group, name) for name in columns]

    def first_row(self, group: int) -> int:
        """Return the number of a group's first row in the file."""
        return sum(self.rows[:group])

    def _array(self, column: Any, group: int, name: str) -> Array:
        dtype, width = self.kinds[name]
        chunks = getattr(column, "chunks", [column])
        first = self.first_row(group)
        arrays = []
        for chunk in chunks:
            self._require_values(chunk, chunk.is_null, name, first)
            if width is None:
                arrays.append(_numbers(chunk, dtype))
            else:
                arrays.append(self._rows_of_lists(chunk, dtype, name, first))
            first += len(chunk)
        if not arrays:
            return np.empty((0,) if width is None else (0, width), dtype)
        widths = {array.shape[1:] for array in arrays if len(array)}
        if len(widths) > 1:
            raise UserError(f"{self.path}: column {name!r} must hold lists of one length")
        full = [array for array in arrays if len(array)] or arrays[:1]
        return full[0] if len(full) == 1 else np.concatenate(full)

    def _rows_of_lists(self, chunk: Any, dtype: np.dtype[Any], name: str, first: int) -> Array:
        compute = import_module("pyarrow.compute")
        lengths = compute.list_value_length(chunk).to_numpy(zero_copy_only=False)
        values = chunk.flatten()
        width = int(lengths[0]) if len(lengths) else 0
        other = np.flatnonzero(lengths != width)
        if len(other):
            row = int(other[0])
            raise UserError(
                f"{self.path}: column {name!r} has {lengths[row]} values in row {first + row}: "
                f"must be {width}, as in row {first}"
            )
        self._require_values(values, values.is_null, name, first, max(width, 1))
        return _numbers(values, dtype).reshape(len(lengths), width)

    def _require_values(
        self, chunk: Any, is_null: Any, name: str, first: int, width: int = 1
    ) -> None:
        if chunk.null_count:
            missing = np.asarray(is_null().to_numpy(zero_copy_only=False))
            row = first + int(missing.argmax()) // width
            raise UserError(f"{self.path}: column {name!r} is null in row {row}: must be a number")

    def _as_user_error(self) -> AbstractContextManager[None]:
        return _AsUserError(f"{self.path} is not a well-formed {self.format} file")


class ParquetFile(ColumnFile):
    """A Parquet file; its groups are the row groups. Page checksums are verified, if present."""

    format = "Parquet"

    def _opened(self, file: Any) -> tuple[Any, list[int]]:
        parquet = import_module("pyarrow.parquet").ParquetFile(file)
        meta = parquet.metadata
        return parquet.schema_arrow, [
            meta.row_group(i).num_rows for i in range(meta.num_row_groups)
        ]

    def _read(self, file: Any, group: int, columns: list[str]) -> Any:
        parquet = import_module("pyarrow.parquet").ParquetFile(
            file, page_checksum_verification=True
        )
        return parquet.read_row_group(group, columns=columns, use_threads=False)


class ArrowFile(ColumnFile):
    """An Arrow file (also Feather, version 2); its groups are the record batches."""

    format = "Arrow"

    def _opened(self, file: Any) -> tuple[Any, list[int]]:
        magic = file.read(8)
        if not magic.startswith(b"ARROW1"):
            raise UserError(
                f"{self.path} is not an Arrow file: it must begin with ARROW1, as pyarrow.feather "
                f"and pyarrow.ipc.new_file write it (not a stream): it begins with {magic!r}"
            )
        file.seek(0)
        schema = import_module("pyarrow.ipc").open_file(file).schema
        few = [i for i, type_ in enumerate(schema.types) if (_kind_of(type_) or (0, 0))[1] is None]
        reader = self._of_columns(file, few[:1])  # one column suffices to count rows
        return schema, [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]

    def _read(self, file: Any, group: int, columns: list[str]) -> Any:
        schema = import_module("pyarrow.ipc").open_file(file).schema
        indexes = [schema.get_field_index(name) for name in columns]
        return self._of_columns(file, indexes).get_batch(group)

    def _of_columns(self, file: Any, indexes: list[int]) -> Any:
        ipc = import_module("pyarrow.ipc")
        file.seek(0)
        options = ipc.IpcReadOptions(included_fields=indexes, use_threads=False)
        return ipc.open_file(file, options=options)


class _AsUserError(AbstractContextManager[None]):
    """A context that converts pyarrow's exceptions, such as for a damaged file, to a UserError."""

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, UserError):
            raise UserError(f"{self.problem}: {line_of(error)}") from None


def require_pyarrow(format: str) -> None:
    """Raise a UserError if pyarrow is missing. Local."""
    try:
        import_module("pyarrow")
    except ImportError as error:
        raise UserError(
            f"{format} files need pyarrow, which cannot be imported ({error}): {EXTRA}"
        ) from None


def _indexes(names: Sequence[str], metadata: Mapping[bytes, bytes]) -> frozenset[str]:
    """Return the index columns, by their names or by pandas' metadata in the file."""
    noted: Any = {}
    with suppress(ValueError, RecursionError):  # ignore damaged metadata
        noted = json.loads(metadata.get(b"pandas", b"{}"))
    listed = noted.get("index_columns") if isinstance(noted, dict) else None
    found = {one for one in listed if isinstance(one, str)} if isinstance(listed, list) else set()
    found |= ROW_NAMES.intersection(names[:1])  # row names of a CSV file, read and saved by pandas
    return frozenset(name for name in names if name in found or INDEX.fullmatch(name))


def _kind_of(type_: Any) -> tuple[np.dtype[Any], int | None] | None:
    """Return dtype and width of a column (see `ColumnFile.kinds`); None if not numeric."""
    types = import_module("pyarrow").types
    width: int | None = None
    if types.is_fixed_size_list(type_):
        type_, width = type_.value_type, type_.list_size
    elif types.is_list(type_) or types.is_large_list(type_):
        type_, width = type_.value_type, 0
    if not (types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_)):
        return None
    dtype = np.dtype(type_.to_pandas_dtype())
    return (dtype, width) if dtype.kind in NUMBERS else None


def _numbers(values: Any, dtype: np.dtype[Any]) -> Array:
    return np.asarray(values.to_numpy(zero_copy_only=False)).astype(dtype, copy=False)
