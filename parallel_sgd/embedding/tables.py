"""One server's parts of all embedding tables: pulled, pushed to, copied, and kept in files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..array_files import write_arrays
from ..communication import InBackground
from ..errors import UserError
from .files import contents_of, file_of
from .options import Embedding
from .rows import RowTable, server_of

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
        self.options, self._server, self._servers = tuple(options), server, servers
        self._tables = [RowTable(table) for table in options]
        self._copy: dict[str, Array] | None = None
        self._writing: InBackground[str] | None = None

    def pull(self, table: int, ids: Array) -> Array:
        """The rows of ids, int64 [m], of the table of a number: float32 [m, width].

        Raises:
            UserError: the ids are not possible.
        """
        rows = np.empty((len(ids), self.options[table].width), np.float32)
        self._tables[table].pull(ids, rows)
        return rows

    def push(self, table: int, ids: Array, gradient: Array, samples: int, lr_factor: float) -> None:
        """Change the rows of ids by their gradients, as `RowTable.push`.

        Raises:
            UserError: the ids are not possible, or the gradient, float32 [m, width], is not finite.
        """
        if not np.isfinite(gradient).all():
            raise UserError(
                f"the gradient of rows of table {self.options[table].name!r} is not finite"
            )
        self._tables[table].push(ids, gradient, samples, lr_factor)

    def counts(self) -> Array:
        """int64 [tables, 4]: see `COUNTS`."""
        counts = [[len(t), t.nbytes, t.pending, t.evicted] for t in self._tables]
        return np.array(counts, np.int64).reshape(-1, len(COUNTS))

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
            raise UserError("there is no copy of the tables, or it is being written already")
        path, copy = Path(folder, file_of(self._server)), self._copy
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
            UserError: as `contents_of`; then nothing has changed.
        """
        tables = [RowTable(table) for table in self.options]
        for contents in contents_of(self.options, folder):
            for table, arrays in zip(tables, contents, strict=True):
                own = {name: array.whole() for name, array in arrays.items()}
                table.add(own, lambda ids: server_of(ids, self._servers) == self._server)
        self._tables = tables
