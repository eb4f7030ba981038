"""Recording and replay of the order in which a server answers its workers.

A worker's messages depend on the worker's data and on the answers received. A server's answers
depend on the messages received and on their order. So the order is sufficient to repeat a run bit
for bit.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..files import content_of, write_whole
from ..validation import shown

FLUSH_EVERY = 4096  #: requests per write

Facts = dict[str, str]  #: texts by name


class Order:
    """The order of a server's answers. This base class accepts requests as they arrive."""

    def next(self) -> int | None:
        """Return the worker whose turn it is, or None if any worker may be next."""
        return None

    def answered(self, worker: int) -> None:
        """Record that a worker's request has been handled."""

    def write(self) -> None:
        """Write all recorded entries to the file."""

    def close(self) -> None:
        """End the recording."""

    def discard(self) -> None:
        """Delete the files of a recording that has not begun."""


class RecordedOrder(Order):
    """Accepts requests as they arrive, and records the order in a file.

    Args:
        folder: created if missing.
        server: number of this server.
        facts: must be equal in the replay.
    Raises:
        UserError: the folder cannot be written to, now or later, or already holds a recording.
    """

    def __init__(self, folder: str, server: int, facts: Facts) -> None:
        self._path = path = _path(folder, server)
        self._facts, self._description, self._folder = facts, path.with_suffix(".json"), folder
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = path.open("xb", buffering=0)
        except FileExistsError:
            if not Path(folder).is_dir():
                raise UserError(f"record={folder!r} must be a folder, but is a file") from None
            raise UserError(f"record={folder!r} has a recording already") from None
        except (OSError, ValueError) as error:
            raise UserError(f"record={folder!r} must be a folder to write to: {error}") from None
        self._unwritten: list[int] = []
        self._written = 0
        self._is_whole = True  # False after a failed write
        try:
            self._describe(None)
        except BaseException:
            self.discard()
            raise

    def answered(self, worker: int) -> None:
        self._unwritten.append(worker)
        if len(self._unwritten) == FLUSH_EVERY:
            self.write()

    def write(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        data = memoryview(np.array(unwritten, "<i4").tobytes())
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._is_whole = False
            raise UserError(
                f"record={self._folder!r}: the order cannot be written: {error}"
            ) from None
        self._written += len(unwritten)

    def close(self) -> None:
        try:
            self.write()
            if self._is_whole:
                self._describe(self._written)
        finally:
            self._file.close()

    def discard(self) -> None:
        self._file.close()
        for path in (self._path, self._description):
            with suppress(OSError):
                path.unlink()

    def _describe(self, requests: int | None) -> None:
        """Write the facts and the number of requests: null until the recording is closed."""
        text = json.dumps({**self._facts, "requests": requests}, indent=1)
        write_whole("record", self._description, lambda path: path.write_text(text), follow=False)


class ReplayedOrder(Order):
    """Repeats a recorded order. Later requests are accepted on arrival.

    Raises:
        UserError: the folder has no recording, or the recording is damaged or of a different run.
    """

    def __init__(self, folder: str, server: int, facts: Facts) -> None:
        path = _path(folder, server)
        try:
            recorded = _facts_in(path.with_suffix(".json"))
            requests = recorded.pop("requests")
            data = content_of(path.name, path)
        except (OSError, ValueError) as error:
            raise UserError(f"replay={folder!r}: no order of server {server} ({error})") from None
        for name in sorted(facts.keys() | recorded.keys()):
            here, there = facts.get(name, "none"), recorded.get(name, "none")
            if here != there:
                what = f"{_in_one_line(name)}={_in_one_line(there)}"
                raise UserError(f"replay={folder!r} is of {what}, but here it is {here}")
        self._order = np.frombuffer(data[: len(data) // 4 * 4], "<i4").tolist()
        known = range(int(facts["workers"]))
        whole = requests in (None, len(data) / 4) and all(worker in known for worker in self._order)
        if not whole:
            raise UserError(f"replay={folder!r}: {path.name} is damaged")
        self._next, self._server = 0, server

    def next(self) -> int | None:
        return self._order[self._next] if self._next < len(self._order) else None

    def answered(self, worker: int) -> None:
        self._next += 1
        if self._next == len(self._order):
            print(
                f"parallel_sgd: server {self._server} has replayed all {self._next} recorded "
                "requests: from now on requests are answered in their order of arrival",
                file=sys.stderr,
                flush=True,
            )


def _facts_in(path: Path) -> dict[str, Any]:
    """Return the facts of a recording.

    Raises:
        OSError, ValueError: the file is missing or not a recording.
    """
    try:
        written = json.loads(content_of(path.name, path))
    except RecursionError:
        written = None
    if not isinstance(written, dict) or "requests" not in written:
        raise ValueError(f'{path.name} must be a JSON object that has "requests"')
    requests = written["requests"]
    if requests is not None and type(requests) is not int:
        raise ValueError(f'{path.name}: "requests" must be a whole number or null')
    return written


def _in_one_line(written: Any) -> str:
    """Return a printable text unchanged, and any other value as `shown` formats it."""
    return written if isinstance(written, str) and written.isprintable() else shown(written)


def _path(folder: str, server: int) -> Path:
    return Path(folder, f"order-of-server-{server}.i4")
