"""The order in which a server has answered its workers: recorded, and replayed.

What a worker sends depends on its data and on the answers that it got; a server's answers depend on
what it got, in its order. So the order is all that must be known to repeat a run bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import numpy as np

from ..errors import UserError

FLUSHED = 4096  #: requests that are written at a time


class Order(Protocol):
    """Whose request a server answers next."""

    def next(self) -> int | None:
        """The worker whose turn it is; None where anybody may come."""
        ...

    def answered(self, worker: int) -> None:
        """A worker's request has been handled."""
        ...

    def write(self) -> None:
        """Bring what is recorded to the file."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class AnyOrder:
    """As requests come."""

    def next(self) -> int | None:
        return None

    def answered(self, worker: int) -> None:
        pass

    def write(self) -> None:
        pass

    def close(self) -> None:
        pass


class RecordedOrder(AnyOrder):
    """As requests come, written to a file.

    Args:
        folder: made if there is none.
        server, servers, workers: this server's number, and how many there are of both.
    Raises:
        UserError: it cannot be written to.
    """

    def __init__(self, folder: str, server: int, servers: int, workers: int) -> None:
        path = _path(folder, server)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            counts = {"servers": servers, "workers": workers}
            path.with_suffix(".json").write_text(json.dumps(counts))
            self._file = path.open("wb")
        except OSError as error:
            raise UserError(f"record={folder!r} must be a folder to write to: {error}") from None
        self._unwritten: list[int] = []

    def answered(self, worker: int) -> None:
        self._unwritten.append(worker)
        if len(self._unwritten) == FLUSHED:
            self.write()

    def write(self) -> None:
        if self._unwritten:
            self._file.write(np.array(self._unwritten, "<i4").tobytes())
            self._file.flush()
            self._unwritten.clear()

    def close(self) -> None:
        self.write()
        self._file.close()


class ReplayedOrder(AnyOrder):
    """The recorded order, and after its end any.

    Raises:
        UserError: nothing is recorded there, or it is of another number of servers or workers.
    """

    def __init__(self, folder: str, server: int, servers: int, workers: int) -> None:
        path = _path(folder, server)
        try:
            recorded = json.loads(path.with_suffix(".json").read_text())
            self._order = np.fromfile(path, "<i4").tolist()
        except (OSError, ValueError) as error:
            raise UserError(f"replay={folder!r}: no order of server {server} ({error})") from None
        if recorded != {"servers": servers, "workers": workers}:
            raise UserError(
                f"replay={folder!r} is of {recorded.get('workers')} workers and "
                f"{recorded.get('servers')} servers, but here are {workers} and {servers}"
            )
        self._next = 0

    def next(self) -> int | None:
        return self._order[self._next] if self._next < len(self._order) else None

    def answered(self, worker: int) -> None:
        self._next += 1


def _path(folder: str, server: int) -> Path:
    return Path(folder, f"order-of-server-{server}.i4")
