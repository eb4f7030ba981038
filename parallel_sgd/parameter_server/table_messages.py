"""Embedding tables by messages: a worker's requests for rows, and what a server does with them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..communication.endpoint import as_bytes
from ..embedding import Embedding, ServedTables
from ..errors import UserError
from .client import Client
from .conversation import Answer, Ask
from .wire import Kind, Malformed, Message, as_text, from_text

Array = npt.NDArray[Any]
Result = TypeVar("Result")

ASKED_EVERY_S = 0.05  #: whether tables are written


class TableClient:
    """A worker's requests to all servers: the `RowServers` of its tables, and their files.

    Every method raises as `Client.ask`. Local.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._answers: list[Answer] = []  # to what is being done

    @property
    def count(self) -> int:
        return self._client.servers

    def in_turn(self, work: Callable[[], Result]) -> Result:
        return self._client.in_turn(lambda: self._timed(work))

    def begin(self, work: Callable[[], Result]) -> Future[Result]:
        return self._client.begin(lambda: self._timed(work))

    def _timed(self, work: Callable[[], Result]) -> Result:
        """Account for the time that it takes; one at a time."""
        begin, self._answers = time.perf_counter(), []
        result = work()
        self._client.spend(self._answers, time.perf_counter() - begin)
        return result

    def pull(self, table: int, ids: Array, starts: Sequence[int], out: Array) -> None:
        asks = []
        for server, own in _concerned(starts):
            body = as_bytes(ids[own])
            message = Message(
                kind=Kind.PULL_ROWS, table=table, count=len(ids[own]), body=body.nbytes
            )
            asks.append(Ask(server, message, body, as_bytes(out[own])))
        self._answers += self._client.ask(asks)
        self._client.statistics.rows_pulled += len(out)

    def push(
        self, table: int, ids: Array, starts: Sequence[int], gradient: Array, samples: int
    ) -> None:
        asks = []
        for server, own in _concerned(starts):
            body = np.concatenate([as_bytes(ids[own]), as_bytes(gradient[own])])
            message = Message(
                kind=Kind.PUSH_ROWS,
                table=table,
                count=len(ids[own]),
                body=body.nbytes,
                samples=samples,
                factor=self._client.factor,
            )
            asks.append(Ask(server, message, body))
        self._answers += self._client.ask(asks)
        self._client.statistics.rows_pushed += len(gradient)

    def counts(self) -> npt.NDArray[np.int64]:
        counts = [body.view(np.int64).reshape(-1, 4) for body in self._ask_all(Kind.COUNT_TABLES)]
        return np.sum(counts, axis=0)  # type: ignore[no-any-return]

    def write(self, folder: str) -> dict[str, Any]:
        """Have servers write what `Kind.COPY_TABLES` has copied, while training goes on.

        Returns:
            Size and checksum of every file, by name.
        """
        self._ask_all(Kind.WRITE_TABLES, folder)
        texts = [""]
        while not all(texts):
            time.sleep(ASKED_EVERY_S)
            texts = [as_text(body) for body in self._ask_all(Kind.ASK_WRITTEN)]
        facts: dict[str, Any] = {}
        for text in texts:
            facts.update(json.loads(text))
        if "problem" in facts:
            raise UserError(facts["problem"])
        return facts

    def load(self, folder: str) -> None:
        """Have servers take up the rows that any number of servers have written."""
        self._ask_all(Kind.LOAD_TABLES, folder)

    def _ask_all(self, kind: Kind, text: str | None = None) -> list[Array]:
        """Ask every server the same; the answers' bodies."""
        body = None if text is None else from_text(text)
        answers = self._client.in_turn(lambda: self._client.ask_all(kind, body))
        return [answer.body for answer in answers]


def _concerned(starts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The servers that hold some of the ids, and where theirs are."""
    for server, (first, end) in enumerate(pairwise(starts)):
        if first < end:
            yield server, slice(first, end)


def _pull(tables: ServedTables, message: Message, body: Array) -> tuple[Kind, Array]:
    _require_form(tables, message, lambda options: 8)
    return Kind.ROWS, as_bytes(tables.pull(message.table, body.view(np.int64)))


def _push(tables: ServedTables, message: Message, body: Array) -> tuple[Kind, None]:
    options = _require_form(tables, message, lambda options: 8 + 4 * options.width)
    ids = body[: 8 * message.count].view(np.int64)
    gradient = body[8 * message.count :].view(np.float32).reshape(-1, options.width)
    tables.push(message.table, ids, gradient, message.samples, message.factor)
    return Kind.DONE, None


def _require_form(
    tables: ServedTables, message: Message, bytes_of: Callable[[Embedding], int]
) -> Embedding:
    """See that there is the table that a message is about, and that the body fits.

    Args:
        bytes_of: how many bytes each id takes, with what belongs to it.
    Returns:
        The table's options.
    """
    if message.table >= len(tables.options):
        known = ", ".join(f"{i}: {options.name!r}" for i, options in enumerate(tables.options))
        raise Malformed(f"table={message.table} is not known; there are {known or 'none'}")
    options = tables.options[message.table]
    required = bytes_of(options) * message.count
    if message.body != required:
        raise Malformed(
            f"body={message.body} of {message.kind.name} with {message.count} ids of table "
            f"{options.name!r} must be {required}: has the worker another width?"
        )
    return options


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
