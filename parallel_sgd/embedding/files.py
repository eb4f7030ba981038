"""Files of the servers' table rows: one file per server, with all its tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..array_files import ArrayInFile, open_arrays
from ..errors import UserError
from ..files import reason
from ..validation import shown
from .gathered import GatheredRows
from .options import Table
from .rows import RowTable


def file_of(server: int) -> str:
    """Return the name of a server's file."""
    return f"tables-{server:05d}.safetensors"


def contents_of(options: Sequence[Table], folder: str) -> Iterator[list[dict[str, ArrayInFile]]]:
    """Yield each file of a folder: the arrays of each table, named as by `RowTable.contents`.

    Local.

    Raises:
        UserError: there are no files, or a file is unreadable or does not match the tables.
    """
    named = "\0" not in folder  # with NUL, Python 3.13 raises, and earlier versions find nothing
    try:
        paths = sorted(Path(folder).glob("tables-*.safetensors")) if named else []
    except OSError as error:  # for example a name that is too long
        raise UserError(f"checkpoint {shown(folder)} cannot be read: {reason(error)}") from None
    if not paths:
        raise UserError(f"checkpoint {folder!r} has no tables")
    for path in paths:
        try:
            file = open_arrays(path)
            arrays = {name: ArrayInFile(file, name) for name in file.keys()}  # noqa: SIM118
            tables = [_of_table(arrays, number, table) for number, table in enumerate(options)]
            unknown = sorted(arrays.keys() - {f"{i}.{n}" for i, t in enumerate(tables) for n in t})
            if unknown:
                raise UserError(f"{unknown[0]} is of none of these tables")
        except Exception as error:  # safetensors' own among them
            raise UserError(f"{str(path)!r} cannot be read: {error}") from error
        yield tables


def check_tables(options: Sequence[Table], folder: str) -> None:
    """Check that the rows in a folder can be loaded. Local.

    Raises:
        UserError: as `contents_of`.
    """
    for _ in contents_of(options, folder) if options else ():
        pass


def _of_table(
    arrays: Mapping[str, ArrayInFile], number: int, options: Table
) -> dict[str, ArrayInFile]:
    """Return a table's arrays, of the same form as in an empty table except for the length."""
    taken: dict[str, ArrayInFile] = {}
    likes = RowTable(options).contents() | GatheredRows(options.width).contents()
    gathered = any(f"{number}.{name}" in arrays for name in likes if name.startswith("gathered"))
    for name, like in likes.items():
        array = arrays.get(f"{number}.{name}")
        if array is None and name.endswith(("pushed", "pending_ids", "pending_counts")):
            continue
        if name.startswith("gathered") and not gathered:
            continue
        rows = next((f"{k}_ids" for k in ("pending", "gathered") if name.startswith(k)), "ids")
        length = 1 if name in ("samples", "swept") else _length(arrays.get(f"{number}.{rows}"))
        wanted = (length, *like.shape[1:])
        if array is None or array.dtype != like.dtype or array.shape != wanted:
            is_ = "missing" if array is None else f"{array.dtype} {list(array.shape)}"
            raise UserError(f"{number}.{name} must be {like.dtype} {list(wanted)}, but is {is_}")
        counts = like.dtype == np.int64 and not name.endswith("ids")
        if counts and array.whole().min(initial=0) < 0:
            raise UserError(f"{number}.{name} must be at least 0")
        taken[name] = array
    return taken


def _length(array: ArrayInFile | None) -> int:
    return array.shape[0] if array is not None and array.shape else 0
