"""The part of one rank in training with servers: a worker's client, a server, or both."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ..communication import InBackground
from ..communication.endpoint import as_bytes
from ..communication.liveness.watchdog import standing_by
from ..compression import Codec
from ..embedding import ArrayTable, ServedTables, Table
from ..errors import SharedError, UserError
from ..kernels import on_host
from ..optimizers import Optimizer
from ..parameters import Parameters
from .client import Client, PendingPush, RepeatablePush
from .order import Facts, Order, RecordedOrder, ReplayedOrder
from .parts import Part, layout
from .placement import Placement
from .remote_array import RemoteArray
from .remote_table import RemoteTable, RemoteTables
from .requests import Answers
from .roles import ServerGroup
from .rules import Rules
from .served import ServedModel
from .server import Server
from .shared_client import SharedClient

Array = Any  #: a NumPy or CuPy array
HostArray = npt.NDArray[Any]
Counters = npt.NDArray[np.int64]


class Connection:
    """A rank's client, server, or both.

    Args:
        group: the workers and the servers.
        parameters: the initial model, the same on all ranks.
        placement: of the model's slices on the servers.
        rules: of pushes.
        tables: the tables.

    Attributes:
        order: of this rank's server's answers.
        finished: True once this rank has left. By then all workers have left, or are about to.

    Local.
    """

    def __init__(
        self,
        group: ServerGroup,
        parameters: Parameters,
        placement: Placement,
        rules: Rules,
        tables: Sequence[Table],
    ) -> None:
        self.group, self._rules, self._tables = group, rules, tuple(tables)
        self._synchronous = rules.mode == "sync"
        group.connection, self.finished = self, False
        self._placement, self._parameters = placement, parameters
        self.order = Order()
        self._optimizer: Optimizer | None = None
        self._thread: ServerThread | None = None
        self._client: Client | None = None
        self._server: Server | None = None
        self._problem: SharedError | None = None
        self.parts = [
            Part(
                placement.runs(server),
                placement.shapes(server),
                parameters,
                None if rules.lossless else self._codec_for(server),
                staged=group.world.fault_tolerant,
            )
            for server in range(len(group.servers))
        ]

    def _codec_for(self, server: int) -> Callable[[float], Codec]:
        """Return a function from bits to the codec of pushes to `server`."""
        slices = self._placement.servers[server]
        sizes = {name: x.size for name, x in self._parameters.items()}
        return lambda bits: self._rules.codec_of_part(bits, slices, sizes)

    def open_order(self, record: str | None, replay: str | None, facts: Facts) -> None:
        """Record the order of this server's answers in a folder, or replay a recorded order.

        Does nothing on a rank without a server.

        Args:
            facts: must be equal in the recording and the replay, in addition to the numbers of
                workers and servers.
        Raises:
            UserError: as `RecordedOrder` and `ReplayedOrder`.
        """
        if not self.group.serves and not self.group.shared:
            return
        workers, servers = str(len(self.group.workers)), str(len(self.group.servers))
        facts = {"workers": workers, "servers": servers, **facts}
        if replay is not None:
            self.order = ReplayedOrder(replay, self.group.server, facts)
        elif record is not None:
            self.order = RecordedOrder(record, self.group.server, facts)

    def bind(self, optimizer: Optimizer) -> None:
        """Set the optimizer of this rank's server. If every rank serves, start the server's thread.

        After a failure of ranks the thread does not start here but in `resume_from`, with the state
        of the earlier servers.
        """
        self._optimizer = optimizer
        if not self.group.world.generation:
            self._begin()

    def resume_from(
        self, vectors: Sequence[HostArray], counters: Counters, tables: ServedTables | None
    ) -> None:
        """Start this rank's server, if any, from a given state.

        Args:
            vectors: [n] each: the model, then the optimizer's buffers, ordered by name.
            counters: int64 [3 + 4 workers]: see `ServedModel.state`.
            tables: this server's tables. None: the tables start afresh.
        """
        if self.serves:
            own = self.parts[self.group.server]
            arrays = [*map(own.cut, vectors), counters]
            self.server.model.set_state(np.concatenate([as_bytes(array) for array in arrays]))
            if tables is not None:
                self.server.tables = tables
        self._begin()

    def _begin(self) -> None:
        if self.group.shared:
            self._thread = ServerThread(self.server)
            dropped = weakref.finalize(self, self._thread.stop)
            dropped.atexit = False  # at exit, the shutdown stops the thread in its order

    @property
    def serves(self) -> bool:
        """True if this rank has a server, alone or in a thread beside the training."""
        return self.group.serves or self.group.shared

    @property
    def server(self) -> Server:
        """This rank's server, created on first use."""
        if self._server is None:
            self._server = self._new_server()
        return self._server

    @property
    def runs(self) -> list[tuple[int, int]]:
        """This server's ranges of the flat vector, as (start, stop)."""
        return self._placement.runs(self.group.server)

    @property
    def client(self) -> Client:
        """The worker's client, created on first use.

        Raises:
            UserError: this rank only serves.
        """
        if self.group.serves:
            raise UserError(
                f"rank {self.group.world.rank} is a server and can only call learner.finish(), "
                "which serves"
            )
        if self._client is None:
            endpoint = self.group.messages.endpoint(self.group.servers, serving=False)
            push = RepeatablePush if self.group.world.fault_tolerant else PendingPush
            decay, relay = self._rules.compression.decay, self.group.relay
            if relay is None:
                self._client = Client(endpoint, self.parts, self._check, push, decay)
            else:
                self._client = SharedClient(
                    endpoint, self.parts, self._check, relay, residual_decay=decay
                )
        return self._client

    def remote_tables(self) -> RemoteTables:
        """Return this rank's side of all tables, by name."""
        client = None if self.group.serves else lambda: self.client
        tables = RemoteTables()
        for number, options in enumerate(self._tables):
            table = RemoteTable(options, number, client, synchronous=self._synchronous)
            if isinstance(options, ArrayTable):
                tables[options.name] = RemoteArray(options, table)
            else:
                tables[options.name] = table
        return tables

    def _check(self, rank: int) -> None:
        """Raise the error of this rank's own server, if it explains a missing answer."""
        if self._thread is not None:
            self._thread.check(asked=rank == self.group.world.rank)

    def _new_server(self) -> Server:
        assert self._optimizer is not None
        group = self.group
        server, servers, workers = group.server, len(group.servers), len(group.workers)
        initial = layout(self._placement.shapes(server), self._parameters.dtype)
        initial.flat = self.parts[server].cut(on_host(self._parameters.flat))
        endpoint = group.messages.endpoint(group.workers, serving=True)
        answers = Answers(endpoint)
        return Server(
            endpoint,
            answers,
            ServedModel(
                initial,
                self._optimizer,
                self._rules,
                workers,
                answers.unread,
                self._codec_for(server),
            ),
            ServedTables(
                self._tables, server, servers, workers=workers, synchronous=self._synchronous
            ),
            self.order,
        )

    def serve(self) -> None:
        """Run the server until all workers have left, then gather the final model.

        A second call does nothing, or raises the same problem.

        Raises:
            UserError, RanksLost: as `Server.serve`.

        Collective over the servers at the end.
        """
        if self._problem is not None:
            raise self._problem
        if self.finished:
            return
        self.finished = True
        server = self.server
        try:
            with standing_by("requests of workers"):
                server.serve()
        except SharedError as error:
            self._problem = error
            raise
        own, counts = self.group.own, [part.values for part in self.parts]
        everything = np.empty(sum(counts), self._parameters.dtype)
        own.allgather(server.model.x, everything, counts)
        for part, end in zip(self.parts, accumulate(counts), strict=True):
            part.put(everything[end - part.values : end], self._parameters.flat)

    def end(self) -> None:
        """Close this worker's client, and wait for the server of the same rank."""
        self.finished = True
        self.client.close()
        if self._thread is not None:
            self._thread.wait()
            self._thread.check(asked=False)

    def end_without_servers(self) -> None:
        """Mark this rank as finished after a failure: servers have ended without its client."""
        self.finished = True
        if self._client is not None:
            self._client.left = True

    def abandon(self) -> None:
        """Stop the server and the client after a failure has revoked the communicators. Local."""
        if self._thread is not None:
            self._thread.stop()
            self._thread.wait()
        if self._client is not None:
            self._client.abandon()
        if self._server is not None:
            self._server.abandon()

    @property
    def failed(self) -> bool:
        """True if this rank knows that training has ended by a problem of a worker."""
        told = self._client is not None and self._client.problem is not None
        return told or self._problem is not None

    def close(self, *, failed: bool) -> None:
        """Release the communicators, and stop the server and the client.

        Args:
            failed: True if training has failed. Ranks may then still communicate, so nothing is
                released.

        Collective over all ranks. After a problem of a worker, of which all ranks know, it does
        nothing: answers may still be on their way. On fault-tolerant ranks nothing is released
        either, because failed ranks would never join the collective.
        """
        if failed or self.failed or self.group.world.fault_tolerant:
            return
        if not self.finished:
            if self._client is not None:
                self._client.close()  # after its background requests
            self.group.world.barrier()
            if self._thread is not None:
                self._thread.end()
        self.group.close()


class ServerThread(InBackground[None]):
    """A server in a thread of a training rank. Ends with all workers or with the connection."""

    def __init__(self, server: Server) -> None:
        self._ended_by: BaseException | None = None  # raised by `check`
        super().__init__("server", lambda: self._serve(server), server.stop)

    def _serve(self, server: Server) -> None:
        try:
            server.serve()
        except BaseException as error:
            self._ended_by = error

    def check(self, *, asked: bool) -> None:
        """Raise the error that has ended the server.

        Args:
            asked: True while this rank's worker waits for this server's answer. A `SharedError` is
                then not raised here: the server's answer brings the same problem, and the worker
                reports it to the remaining servers.
        """
        error = self._ended_by
        if error is not None and not (asked and isinstance(error, SharedError)):
            raise error
