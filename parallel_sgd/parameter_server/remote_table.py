"""A worker's side of tables: rows by id, from any server."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from .. import runtime
from ..communication import InBackground
from ..communication.endpoint import as_bytes
from ..embedding import COUNTS, Table
from ..errors import RanksLost, UserError
from ..kernels import row_kernels
from ..validation import integer, shown
from .client import Client
from .conversation import Ask
from .wire import LARGEST, Kind, Message, as_text, from_text

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Result = TypeVar("Result")

POLL_INTERVAL_S = 0.05  #: interval of queries if the tables are written


class SkipsNonFinite(Protocol):
    """The skip policy of a table's pushes."""

    @property
    def skips(self) -> bool: ...

    def add_problem(self, problem: str) -> None: ...


class Retry(Protocol):
    """Runs a request, and repeats the request after failures of ranks if training goes on."""

    def __call__(self, request: Callable[[], Result]) -> Result: ...


class RemoteTable:
    """The rows of a distributed embedding table (`Embedding`): float32 [width] for each int64 id.

    Only distinct ids travel, with the sum of their gradients. The first push of an id creates its
    row. Until then the row has its initial values, a function of the table's seed and the id.

    Servers train rows on arrival of a push. In mode "sync" of the model, servers wait for the next
    push of the model by all workers. Then they sum the rows' gradients of all workers, in the order
    of the workers, divide by the samples of all workers, and take a step. There a pull returns the
    rows right after the latest push of the model.

    Args:
        options: of the table.
        number: of the table, from 0.
        client: returns the worker's client, created on first use. None on a rank without a worker.
        synchronous: True in mode "sync".

    Attributes:
        skipped: the policy for non-finite pushes. If skipping is off, servers refuse such a push.

    Local. Cost: a message and an answer for each server with some of the rows.
    """

    def __init__(
        self,
        options: Table,
        number: int,
        client: Callable[[], Client] | None,
        *,
        synchronous: bool = False,
    ) -> None:
        self.options, self._number, self._client = options, number, client
        self._kernels, self._synchronous = row_kernels(), synchronous
        self.skipped: SkipsNonFinite | None = None
        self._retry: Retry = _once
        self._to_prefetch: Ids | None = None
        self._prefetching: tuple[Ids, InBackground[Rows]] | None = None

    @property
    def width(self) -> int:
        """Number of values in a row."""
        return self.options.width

    def rebind(self, client: Callable[[], Client] | None, retry: Retry) -> None:
        """Use a different client from now on, and forget prefetched rows.

        Args:
            retry: runs every request.
        """
        self._client, self._retry, self._prefetching = client, retry, None

    def _ask(self, work: Callable[[Client], Result]) -> Result:
        """Run a request of the present client."""

        def request() -> Result:
            client = self._required_client()
            return client.in_order(partial(work, client))

        return self._retry(request)

    def rows(self, ids: Ids) -> Rows:
        """Return rows by id.

        Args:
            ids: int64 [...], any values, repeats allowed.
        Returns:
            float32 [..., width], a copy. Prefetched rows, if the latest `prefetch` had the same
            ids.
        Raises:
            UserError: the ids are not int64.
        """
        flat, self._to_prefetch = self._flat_ids(ids), None
        self._required_client()
        coming = self._retry(self._take_prefetched)
        if coming is not None and np.array_equal(coming[0], flat):
            return coming[1].reshape(*ids.shape, self.width)
        return self._ask(lambda client: self._pull(client, flat)).reshape(*ids.shape, self.width)

    def prefetch(self, ids: Ids) -> None:
        """Begin to pull the rows of the next `rows` in the background.

        The pull begins at once, so its result lacks later pushes. In mode "sync" the pull begins
        after the next step.

        Args:
            ids: as for `rows`; copied.
        """
        flat, client = self._flat_ids(ids).copy(), self._required_client()
        if self._synchronous:
            self._to_prefetch = flat
        else:
            self._begin_to_pull(client, flat)

    def step_taken(self) -> None:
        """In mode "sync": discard rows prefetched before the step. Start a deferred prefetch."""
        if self._synchronous:
            ids, self._to_prefetch, self._prefetching = self._to_prefetch, None, None
            if ids is not None:
                self._begin_to_pull(self._required_client(), ids)

    def _begin_to_pull(self, client: Client, flat: Ids) -> None:
        self._prefetching = flat, client.begin(lambda: self._pull(client, flat))

    def discard_prefetched(self) -> None:
        """Discard prefetched rows, because a checkpoint has replaced the tables."""
        self._to_prefetch = None
        with suppress(RanksLost):  # the next request raises the same error
            self._take_prefetched()

    def _take_prefetched(self) -> tuple[Ids, Rows] | None:
        """Return the prefetched ids and rows, if any. A later call returns None."""
        coming, self._prefetching = self._prefetching, None
        return coming and (coming[0], coming[1].result())

    def push(self, ids: Ids, gradient: Rows, samples: int) -> None:
        """Train rows by the table's optimizer.

        Args:
            ids: int64 [...], any values. The gradients of a repeated id are summed.
            gradient: float32 [..., width], summed over `samples`; not changed.
            samples: of the gradient, at least 1. In mode "sync" the samples of the steps are used
                instead.
        Raises:
            UserError: the ids are not int64, or the gradient has a wrong form or is not finite.
        """
        flat, _ = self._flat_ids(ids), self._required_client()
        samples, name = integer("samples", samples, 1, LARGEST - 1), self.options.name
        if not isinstance(gradient, np.ndarray):
            kind = type(gradient).__name__
            raise UserError(f"gradient of table {name!r} must be a NumPy array, not {kind}")
        if gradient.shape != (*ids.shape, self.width) or gradient.dtype != np.float32:
            raise UserError(
                f"gradient{list(gradient.shape)} of {gradient.dtype} for rows of table "
                f"{name!r} must be float32{[*ids.shape, self.width]}"
            )
        rows = np.ascontiguousarray(gradient).reshape(-1, self.width)
        skipped = self.skipped
        if skipped is not None and skipped.skips and not np.isfinite(rows).all():
            skipped.add_problem(f"the gradient of rows of table {name!r} is not finite")
            return
        clock = self._required_client().next_row_clock()
        self._ask(lambda client: self._push(client, flat, rows, samples, clock))

    def set(self, ids: Ids, values: Rows) -> None:
        """Replace rows at once, in every mode.

        Args:
            ids: int64 [m], without repeats.
            values: float32 [m, width].
        Raises:
            UserError: the values are not finite.
        """
        client = self._required_client()
        if not np.isfinite(values).all():
            raise UserError(f"values of rows of table {self.options.name!r} are not finite")
        order, bounds = self._kernels.partition(ids, client.servers)
        asks = []
        for server, (first, end) in enumerate(pairwise(bounds.tolist())):
            part = order[first:end]
            asks += [self._to_server(Kind.SET_ROWS, server, ids[part], values[part])] * (
                first < end
            )
        self._ask(lambda client: client.ask(asks))

    def counts(self) -> dict[str, int]:
        """Count rows on all servers.

        Returns:
            By name (`COUNTS`): rows, bytes of memory, pushed ids without a row so far, and evicted
            rows.
        """
        answers = self._ask(lambda client: client.ask_all(Kind.COUNT_TABLES))
        tables = np.sum([answer.body.view(np.int64) for answer in answers], axis=0)
        return dict(zip(COUNTS, tables.reshape(-1, 4)[self._number].tolist(), strict=True))

    def _required_client(self) -> Client:
        if self._client is None:
            raise UserError(
                f"table {self.options.name!r}: a rank that only serves cannot ask for rows"
            )
        return self._client()

    def _flat_ids(self, ids: Any) -> Ids:
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int64:
            dtype = getattr(ids, "dtype", None) if isinstance(ids, np.ndarray) else None
            kind = type(ids).__name__ if dtype is None else f"an array of {dtype}"
            hint = " (ids.view(np.int64) has one for each of them)" * (dtype == np.uint64)
            raise UserError(
                f"ids of table {self.options.name!r} must be a NumPy array of int64, not "
                f"{kind}{hint}"
            )
        flat: Ids = np.ascontiguousarray(ids).reshape(-1)
        return flat

    def _by_server(
        self, servers: int, ids: Ids
    ) -> tuple[Ids, list[tuple[int, slice]], npt.NDArray[np.int32]]:
        """Group distinct ids by server.

        Returns:
            The distinct ids [u], sorted by server; the number and the slice of ids of each such
            server; and the position [m] of each given id among the distinct ids.
        """
        distinct, inverse = self._kernels.unique(ids)
        starts = [0, len(distinct)]
        if servers > 1:
            order, bounds = self._kernels.partition(distinct, servers)
            place = np.empty(len(order), np.int32)
            place[order] = np.arange(len(order), dtype=np.int32)
            distinct, starts, inverse = distinct[order], bounds.tolist(), place[inverse]
        spans = enumerate(pairwise(starts))
        held = [(server, slice(first, end)) for server, (first, end) in spans if first < end]
        return distinct, held, inverse

    def _pull(self, client: Client, ids: Ids) -> Rows:
        begin = runtime.perf_counter()
        distinct, held, inverse = self._by_server(client.servers, ids)
        rows = np.empty((len(distinct), self.width), np.float32)
        asks = []
        for server, part in held:
            body, count = as_bytes(distinct[part]), part.stop - part.start
            message = Message(
                kind=Kind.PULL_ROWS, table=self._number, count=count, body=body.nbytes
            )
            asks.append(Ask(server, message, body, as_bytes(rows[part])))
        answers = client.ask(asks)
        out = np.empty((len(ids), self.width), np.float32)
        self._kernels.take_rows(rows, inverse, out)
        client.statistics.rows_pulled += len(rows)
        client.add_seconds(answers, runtime.perf_counter() - begin)
        return out

    def _push(self, client: Client, ids: Ids, gradient: Rows, samples: int, clock: int) -> None:
        begin = runtime.perf_counter()
        distinct, held, inverse = self._by_server(client.servers, ids)
        total = np.empty((len(distinct), self.width), np.float32)
        self._kernels.sum_rows(inverse, gradient, total)
        # A single server refuses the push by itself. Several might apply some parts and not all.
        if client.servers > 1 and not np.isfinite(total).all():
            raise UserError(f"the gradient of rows of table {self.options.name!r} is not finite")
        asks = []
        for server, part in held:
            ask = self._to_server(Kind.PUSH_ROWS, server, distinct[part], total[part])
            ask.message.samples, ask.message.factor = samples, client.factor
            ask.message.clock = clock
            asks.append(ask)
        answers = client.ask(asks)
        client.statistics.rows_pushed += len(total)
        client.add_seconds(answers, runtime.perf_counter() - begin)

    def _to_server(self, kind: Kind, server: int, ids: Ids, rows: Rows) -> Ask:
        """Return a request with rows, float32 [m, width], for a server."""
        body = np.concatenate([as_bytes(ids), as_bytes(rows)])
        message = Message(kind=kind, table=self._number, count=len(ids), body=body.nbytes)
        return Ask(server, message, body)


def _once(request: Callable[[], Result]) -> Result:
    """Run a request whose failure ends the job: see `Retry`."""
    return request()


class RemoteTables(dict[str, Any]):
    """The tables by name. An unknown name raises a UserError."""

    def __missing__(self, name: Any) -> RemoteTable:
        known = ", ".join(map(repr, self)) or "none (DataParallelASGD(tables=...) makes them)"
        raise UserError(f"tables[{shown(name)}] is not known; there are {known}")


def write_tables(client: Client, folder: str) -> dict[str, Any]:
    """Have servers write the rows copied by `ServedState.collect`, while training continues.

    Returns:
        Size and checksum of every file, by name.

    Raises:
        UserError: a file cannot be written.

    Local. Blocks until all files are complete.
    """
    path = from_text(folder)
    client.in_order(lambda: client.ask_all(Kind.WRITE_TABLES, path))
    texts = [""]
    # bounded: servers answer, each in watched(); those that wait for the checkpoint do so in
    # watched(), too
    while not all(texts):
        runtime.sleep(POLL_INTERVAL_S)
        answers = client.in_order(lambda: client.ask_all(Kind.ASK_WRITTEN))
        texts = [as_text(answer.body) for answer in answers]
    facts = {name: fact for text in texts for name, fact in json.loads(text).items()}
    if "problem" in facts:
        raise UserError(facts["problem"])
    return facts


def load_tables(client: Client, folder: str) -> None:
    """Have servers load rows from the files of any number of servers. Local.

    Raises:
        UserError: as `ServedTables.load`.
    """
    path = from_text(folder)
    client.in_order(lambda: client.ask_all(Kind.LOAD_TABLES, path))
