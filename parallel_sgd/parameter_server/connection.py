"""How a rank takes part: as a worker with a client, as a server, or as both."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ..communication.endpoint import as_bytes
from ..communication.launched import survives
from ..kernels import array_module
from ..optimizers import Optimizer
from ..parameters import Parameters
from .client import Client
from .embedding import Embedding
from .group import Group
from .order import AnyOrder, Order, RecordedOrder, ReplayedOrder
from .parts import Part, layout
from .placement import Placement
from .served import Rules, ServedModel
from .server import Server
from .tables import ServedTables

Array = Any  #: a NumPy or CuPy array


class Connection:
    """
    Args:
        group: who works and who serves.
        parameters: the model, as it is at the start on all ranks.
        placement: which server holds which part.
        rules: of pushes.
        tables: the embedding tables.
        error_feedback: as for the exchanges.
        record, replay: folders of orders; None: neither.

    Where every rank does both, its server is a thread that starts as its worker first asks for
    something. Local.
    """

    def __init__(
        self,
        group: Group,
        parameters: Parameters,
        placement: Placement,
        rules: Rules,
        tables: Sequence[Embedding],
        *,
        error_feedback: bool,
        record: str | None,
        replay: str | None,
    ) -> None:
        self.group, self._rules, self._tables = group, rules, tuple(tables)
        self._placement, self._parameters = placement, parameters
        self._record, self._replay = record, replay
        self._optimizer: Optimizer | None = None
        self._thread: ServerThread | None = None
        self._client: Client | None = None
        self.bytes_served = 0
        self.parts = [
            Part(
                placement.runs(server),
                placement.shapes(server),
                parameters,
                rules.codec,
                error_feedback=error_feedback,
            )
            for server in range(len(group.servers))
        ]

    def bind(self, optimizer: Optimizer) -> None:
        """The optimizer of this rank's server, before anything else is asked of it."""
        self._optimizer = optimizer

    @property
    def client(self) -> Client:
        """This worker's side; with the first use its own server begins, where it has one."""
        if self._client is None:
            if self.group.shared:
                self._thread = ServerThread(self._server())
                weakref.finalize(self, self._thread.stop)
            endpoint = self.group.messages.endpoint(self.group.servers, serving=False)
            self._client = Client(endpoint, self.parts, self.group.world.rank, self._check)
        return self._client

    def _check(self) -> None:
        if self._thread is not None:
            self._thread.check()

    def _server(self) -> Server:
        assert self._optimizer is not None
        group = self.group
        server, servers, workers = group.server, len(group.servers), len(group.workers)
        flat = self._parameters.flat
        on_host = flat if array_module(flat) is np else flat.get()
        initial = layout(self._placement.shapes(server), self._parameters.dtype)
        initial.flat = self.parts[server].cut(on_host)
        order: Order = AnyOrder()
        if self._replay is not None:
            order = ReplayedOrder(self._replay, server, servers, workers)
        elif self._record is not None:
            order = RecordedOrder(self._record, server, servers, workers)
        return Server(
            group.messages.endpoint(group.workers, serving=True),
            ServedModel(initial, self._optimizer, self._rules, workers),
            ServedTables(self._tables, server, servers),
            order,
            survives=survives(),
        )

    def serve(self) -> None:
        """Be a server, until all workers have left; then take the whole final model.

        Raises:
            UserError: as `Server.serve`.

        Collective over the servers at its end.
        """
        server = self._server()
        server.serve()
        self.bytes_served = server.bytes_sent
        own, counts = self.group.own, [part.bytes for part in self.parts]
        everything = np.empty(sum(counts), np.uint8)
        own.allgather(as_bytes(server.model.x), everything, counts)
        for part, end in zip(self.parts, accumulate(counts), strict=True):
            values = everything[end - part.bytes : end].view(self._parameters.dtype)
            part.put(values, self._parameters.flat)

    def end(self) -> None:
        """This worker has left; its own server has ended too, or does soon."""
        if self._thread is not None:
            self._thread.join()
            self.bytes_served = self._thread.server.bytes_sent


class ServerThread:
    """A server beside a worker."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.server.serve()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise what has ended the server."""
        if self._error is not None and not self._thread.is_alive():
            raise self._error

    def join(self) -> None:
        self._thread.join()
        self.check()

    def stop(self) -> None:
        """Nobody needs it any more."""
        self.server.stop()
