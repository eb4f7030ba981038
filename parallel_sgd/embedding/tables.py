"""A server's parts of all tables: pulled, pushed to, copied, and stored in files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..array_files import write_arrays
from ..communication import InBackground
from ..errors import UserError
from ..validation import checked_path
from .files import contents_of, file_of
from .gathered import GatheredRows
from .options import Table
from .rows import RowTable, server_of

Array = npt.NDArray[Any]

COUNTS = ("rows", "bytes", "pending", "evicted")


class ServedTables:
    """The rows of all tables on a server.

    Args:
        options: of each table, in the order of their numbers.
        server, servers: number of this server, and the number of servers.
        workers: number of workers.
        synchronous: True if pushes wait for the next `step`, and are applied together.

    Local.
    """

    def __init__(
        self,
        options: Sequence[Table],
        server: int,
        servers: int,
        *,
        workers: int = 1,
        synchronous: bool = False,
    ) -> None:
        self.options, self._server, self._servers = tuple(options), server, servers
        self._workers, self._synchronous = workers, synchronous
        self._tables = [RowTable(table) for table in options]
        self._gathered = [GatheredRows(table.width) for table in options]
        self.row_clocks: dict[int, int] = {}  #: the latest push of rows of each worker
        self._copy: dict[str, Array] | None = None
        self._writing: InBackground[str] | None = None

    def pull(self, table: int, ids: Array) -> Array:
        """Return the rows of ids, int64 [m], from a table: float32 [m, width]."""
        rows = np.empty((len(ids), self.options[table].width), np.float32)
        self._tables[table].pull(ids, rows)
        return rows

    def push(
        self,
        worker: int,
        table: int,
        ids: Array,
        gradient: Array,
        samples: int,
        lr_factor: float,
    ) -> None:
        """Change rows by their gradients, as `RowTable.push`. Synchronous tables wait for `step`.

        Raises:
            UserError: the gradient, float32 [m, width], is not finite.
        """
        if not np.isfinite(gradient).all():
            raise UserError(
                f"the gradient of rows of table {self.options[table].name!r} is not finite"
            )
        if self._synchronous:
            self._gathered[table].add(worker, ids, gradient)
        else:
            self._tables[table].push(ids, gradient, samples, lr_factor)

    def step(self, samples: Mapping[int, int], lr_factor: float, *, mean: bool) -> None:
        """Change every table once, by the pushes since the previous step.

        Args:
            samples: of each worker in the step, by worker number; in total at least 1.
            lr_factor: of the learning rates.
            mean: True: the gradient is the mean over all samples. False: each worker's gradient
                counts in full, as if the worker trained alone.
        Raises:
            UserError: as `RowTable.push`.
        """
        total = sum(samples.values())
        for table, gathered in zip(self._tables, self._gathered, strict=True):
            merges = mean or table.is_per_sample
            weights = {k: 1.0 if merges or not n else total / n for k, n in samples.items()}
            table.push(*gathered.take(weights), total, lr_factor)

    def set(self, table: int, ids: Array, values: Array) -> None:
        """Replace rows at once, as `RowTable.set`.

        Raises:
            UserError: the values, float32 [m, width], are not finite.
        """
        if not np.isfinite(values).all():
            raise UserError(f"values of rows of table {self.options[table].name!r} are not finite")
        self._tables[table].set(ids, values)

    def renumber(self, workers: Mapping[int, int]) -> None:
        """Continue with some of the workers. Waiting pushes of the rest are dropped.

        Args:
            workers: new number by previous number.
        """
        self._workers, clocks = len(workers), self.row_clocks
        self.row_clocks = {new: clocks[k] for k, new in workers.items() if k in clocks}
        for gathered in self._gathered:
            gathered.renumber(workers)

    def counts(self) -> Array:
        """Return the counts of each table, int64 [tables, 4]: see `COUNTS`."""
        counts = [[len(t), t.nbytes, t.pending, t.evicted] for t in self._tables]
        return np.array(counts, np.int64).reshape(-1, len(COUNTS))

    def copy(self) -> None:
        """Copy all rows for `write`, replacing the previous copy."""
        self._copy = {}
        for number, (table, gathered) in enumerate(zip(self._tables, self._gathered, strict=True)):
            contents = table.contents() | (gathered.contents() if self._synchronous else {})
            self._copy |= {f"{number}.{name}": array for name, array in contents.items()}

    def write(self, folder: str) -> None:
        """Begin to write the copy to a file in `folder`. `written` reports completion.

        Raises:
            UserError: there is no copy, a write is in progress, or `folder` is not a valid path.
        """
        if self._copy is None or (self._writing and not self._writing.done):
            raise UserError("there is no copy of the tables, or it is being written already")
        path, copy = checked_path("folder", folder) / file_of(self._server), self._copy
        self._copy = None
        name = f"tables of server {self._server}"
        self._writing = InBackground(
            name, lambda: json.dumps({path.name: write_arrays(path, copy)})
        )

    def written(self) -> str:
        """Return the result of `write` as JSON: size and checksum by file name, or a "problem".

        Empty while writing.
        """
        if self._writing is None or not self._writing.done:
            return ""
        try:
            return self._writing.result()
        except Exception as error:  # of the file system, or safetensors' own
            return json.dumps({"problem": f"tables cannot be written: {error}"})

    def wait(self) -> None:
        """Wait until no file is being written."""
        if self._writing:
            self._writing.wait()

    def load(self, folder: str) -> None:
        """Load this server's rows from the files of any number of servers.

        Raises:
            UserError: as `contents_of`. The tables are then unchanged.
        """
        tables = [RowTable(table) for table in self.options]
        gathered = [GatheredRows(table.width) for table in self.options]
        for contents in contents_of(self.options, folder):
            for table, waiting, arrays in zip(tables, gathered, contents, strict=True):
                saved = {name: array.whole() for name, array in arrays.items()}
                table.add(saved, self._holds)
                waiting.load(saved, self._holds, self._workers)
        self._tables, self._gathered = tables, gathered

    def _holds(self, ids: Array) -> Array:
        """Return which ids, int64 [m], belong to this server: bool [m]."""
        held: Array = server_of(ids, self._servers) == self._server
        return held
