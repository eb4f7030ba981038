"""One server's parts of all embedding tables: requests checked, carried out, and kept in files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..array_files import ArrayInFile, open_arrays, write_arrays
from ..communication import InBackground
from ..communication.endpoint import as_bytes
from ..errors import UserError
from .embedding import Embedding
from .rows import RowTable, server_of
from .wire import Kind, Malformed, Message, as_text, from_text

Array = npt.NDArray[Any]

COUNTS = ("rows", "bytes", "pending", "evicted")


class ServedTables:
    """The rows of all embedding tables that one server holds.

    Args:
        options: of each table, in the order of their numbers.
        server, servers: this server's number, and how many there are.

    Local.
    """

    def __init__(self, options: Sequence[Embedding], server: int, servers: int) -> None:
        self._options, self._server, self._servers = tuple(options), server, servers
        self._tables = [RowTable(each) for each in options]
        self._copy: dict[str, Array] | None = None
        self._writing: InBackground[str] | None = None

    def pull(self, message: Message, body: Array) -> Array:
        """The rows of the ids in `body`: float32 [count, width].

        Raises:
            UserError: there is no such table, or the ids are not possible.
        """
        table, options = self._table(message)
        self._require_bytes(message, 8 * message.count)
        rows = np.empty((message.count, options.width), np.float32)
        table.pull(body.view(np.int64), rows)
        return rows

    def push(self, message: Message, body: Array) -> None:
        """Change the rows of ids by their gradients: `body` holds the ids, then float32 rows.

        Raises:
            UserError: as `pull`.
        """
        table, options = self._table(message)
        self._require_bytes(message, (8 + 4 * options.width) * message.count)
        ids = body[: 8 * message.count].view(np.int64)
        gradient = body[8 * message.count :].view(np.float32).reshape(-1, options.width)
        if not np.isfinite(gradient).all():
            raise UserError(f"the gradient of rows of table {options.name!r} is not finite")
        table.push(ids, gradient, message.samples, message.factor)

    def _table(self, message: Message) -> tuple[RowTable, Embedding]:
        if message.table >= len(self._tables):
            known = ", ".join(f"{i}: {each.name!r}" for i, each in enumerate(self._options))
            raise Malformed(f"table={message.table} is not known; there are {known or 'none'}")
        return self._tables[message.table], self._options[message.table]

    def _require_bytes(self, message: Message, required: int) -> None:
        if message.body != required:
            name = self._options[message.table].name
            raise Malformed(
                f"body={message.body} of {message.kind.name} with {message.count} ids of table "
                f"{name!r} must be {required}: has the worker another width?"
            )

    def counts(self) -> Array:
        """int64 [tables, 4]: see `COUNTS`."""
        found = [[len(t), t.nbytes, t.pending, t.evicted] for t in self._tables]
        return np.array(found, np.int64).reshape(-1, len(COUNTS))

    def copy(self) -> None:
        """Keep a copy of all rows as they are now, in place of the one before."""
        self._copy = {
            f"{number}.{name}": array
            for number, table in enumerate(self._tables)
            for name, array in table.contents().items()
        }

    def write(self, folder: str) -> None:
        """Begin to write the copy to a file in `folder`; `written` tells when it is there.

        Raises:
            UserError: there is no copy, or one is still being written.
        """
        if self._copy is None or (self._writing and not self._writing.done):
            raise Malformed("there is no copy of the tables, or it is being written already")
        path, copy = Path(folder, f"tables-{self._server:05d}.safetensors"), self._copy
        self._copy = None
        name = f"tables of server {self._server}"
        self._writing = InBackground(
            name, lambda: json.dumps({path.name: write_arrays(path, copy)})
        )

    def written(self) -> str:
        """Size and checksum of the file by its name, as JSON, or the "problem" that there was;
        empty while it is being written."""
        if self._writing is None or not self._writing.done:
            return ""
        try:
            return self._writing.result()
        except Exception as error:  # of the file system, or safetensors' own
            return json.dumps({"problem": f"embedding tables cannot be written: {error}"})

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._writing:
            self._writing.wait()

    def load(self, folder: str) -> None:
        """Take up the rows that are this server's, from the files of any number of servers.

        Raises:
            UserError: there are none, or one cannot be read.
        """
        tables = [RowTable(each) for each in self._options]
        for path in _files_in(folder):
            for table, arrays in zip(tables, _contents(path, self._options), strict=True):
                own = {name: array.whole() for name, array in arrays.items()}
                table.add(own, lambda ids: server_of(ids, self._servers) == self._server)
        self._tables = tables


def check_tables(options: Sequence[Embedding], folder: str) -> None:
    """See that the rows of all tables in a folder can be taken up. Local.

    Raises:
        UserError: as `ServedTables.load`.
    """
    for path in _files_in(folder) if options else ():
        _contents(path, options)


def _files_in(folder: str) -> list[Path]:
    paths = sorted(Path(folder).glob("tables-*.safetensors"))
    if not paths:
        raise UserError(f"checkpoint {folder!r} has no embedding tables")
    return paths


def _contents(path: Path, options: Sequence[Embedding]) -> list[dict[str, ArrayInFile]]:
    """What a file holds of each table, by the names of `RowTable.contents`, checked."""
    try:
        file = open_arrays(path)
        found = {name: ArrayInFile(file, name) for name in file.keys()}  # noqa: SIM118
        tables = [_of_table(found, number, each) for number, each in enumerate(options)]
        unknown = sorted(found.keys() - {f"{i}.{n}" for i, t in enumerate(tables) for n in t})
        if unknown:
            raise UserError(f"{unknown[0]} is of none of these tables")
    except Exception as error:  # safetensors' own among them
        raise UserError(f"{str(path)!r} cannot be read: {error}") from error
    return tables


def _of_table(
    found: Mapping[str, ArrayInFile], number: int, options: Embedding
) -> dict[str, ArrayInFile]:
    """The arrays of one table: each as an empty one has it, but for the number of rows."""
    taken: dict[str, ArrayInFile] = {}
    for name, like in RowTable(options).contents().items():
        array = found.get(f"{number}.{name}")
        if array is None and name.endswith(("pushed", "pending_ids", "pending_counts")):
            continue
        rows = "pending_ids" if name.startswith("pending") else "ids"
        length = 1 if name in ("samples", "swept") else _length(found.get(f"{number}.{rows}"))
        wanted = (length, *like.shape[1:])
        if array is None or array.dtype != like.dtype or array.shape != wanted:
            is_ = "missing" if array is None else f"{array.dtype} {list(array.shape)}"
            raise UserError(f"{number}.{name} must be {like.dtype} {list(wanted)}, but is {is_}")
        if like.dtype == np.int64 and array.whole().min(initial=0) < 0:
            raise UserError(f"{number}.{name} must be at least 0")
        taken[name] = array
    return taken


def _length(array: ArrayInFile | None) -> int:
    return array.shape[0] if array is not None and array.shape else 0


def _pull(tables: ServedTables, message: Message, body: Array) -> tuple[Kind, Array]:
    return Kind.ROWS, as_bytes(tables.pull(message, body))


def _push(tables: ServedTables, message: Message, body: Array) -> tuple[Kind, None]:
    tables.push(message, body)
    return Kind.DONE, None


def _copy(tables: ServedTables, message: Message, body: Array) -> tuple[Kind, None]:
    tables.copy()
    return Kind.DONE, None


def _write(tables: ServedTables, message: Message, body: Array) -> tuple[Kind, None]:
    tables.write(as_text(body))
    return Kind.DONE, None


def _written(tables: ServedTables, message: Message, body: Array) -> tuple[Kind, Array]:
    return Kind.TEXT, from_text(tables.written())


def _load(tables: ServedTables, message: Message, body: Array) -> tuple[Kind, None]:
    tables.load(as_text(body))
    return Kind.DONE, None


def _counts(tables: ServedTables, message: Message, body: Array) -> tuple[Kind, Array]:
    return Kind.STATE, as_bytes(tables.counts())


TableRequest = Callable[[ServedTables, Message, Array], tuple[Kind, Array | None]]

TABLE_REQUESTS: dict[Kind, TableRequest] = {
    Kind.PULL_ROWS: _pull,
    Kind.PUSH_ROWS: _push,
    Kind.COPY_TABLES: _copy,
    Kind.WRITE_TABLES: _write,
    Kind.ASK_WRITTEN: _written,
    Kind.LOAD_TABLES: _load,
    Kind.COUNT_TABLES: _counts,
}
"""What each of them does, and the answer's kind and body."""
