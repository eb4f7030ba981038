"""What parameter servers hold, as a part of the workers' state: for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..communication import Communicator
from ..errors import UserError
from ..kernels import array_module
from ..optimizers import OptimizerState
from ..state import across
from .client import Client
from .served import COUNTERS, OF_EACH_WORKER
from .wire import LARGEST, Kind

Array = Any  #: a NumPy or CuPy array
Counters = npt.NDArray[np.int64]


@dataclass
class ServedState:
    """
    Attributes:
        vectors: [1 + buffers, n], the model, and the optimizer's buffers in the order of their
            names, whichever server held which part: on worker 0 after `collect`, else None.
        counters: int64 [servers, 3 + 4 workers]: of each server its version, the optimizer's steps,
            its samples; then each worker's clock, pushes that changed the model, the version that
            it pulled, and the one that its next push is of (`ServedModel.state`).

    Both are None but between `collect` and the next push.
    """

    vectors: Array | None = across("same", default=None)
    counters: Counters | None = across("same", default=None)

    @staticmethod
    def check(
        saved: Mapping[str, Any], x: Array, buffers: int, workers: int, *, first: bool
    ) -> None:
        """See that a saved one, by field, can be put back. Local.

        Args:
            x, buffers: as for `collect`.
            workers: that there were.
            first: whether this is worker 0, who has the vectors.
        Raises:
            UserError: naming what is not possible.
        """
        vectors, counters = saved["vectors"], saved["counters"]
        if counters is None:
            raise UserError("a state of after learner.finish() lacks what servers held")
        columns = COUNTERS + OF_EACH_WORKER * workers
        if counters.dtype != np.int64 or counters.ndim != 2 or counters.shape[1] != columns:
            raise UserError(f"has algorithm.served.counters that are no int64 [servers, {columns}]")
        if not len(counters) or counters.min() < 0 or counters.max() > LARGEST // 2:
            raise UserError(
                "has algorithm.served.counters that are missing, less than 0, or more than any run"
            )
        clocks = counters[:, COUNTERS : COUNTERS + workers]
        if (clocks != clocks[0]).any():
            raise UserError("has algorithm.served.counters that differ in how often workers pushed")
        shape = (1 + buffers, x.size)
        if first and (vectors is None or (vectors.shape, vectors.dtype) != (shape, x.dtype)):
            raise UserError(f"has algorithm.served.vectors that are no {x.dtype} {list(shape)}")

    def discard(self) -> None:
        """Training goes on, and this is not true any more."""
        self.vectors = self.counters = None

    def collect(self, client: Client, x: Array, buffers: int, comm: Communicator) -> None:
        """Fetch it: of the moment when all workers have called this. Collective.

        Args:
            x: [n], the model, for its size and dtype.
            buffers: how many the servers' optimizer has.
        """
        client.meet()
        counters = comm.together(  # others would wait for a worker 0 that fails
            lambda: self._fetch(client, x, buffers, comm.size) if comm.rank == 0 else None
        )
        self.counters = cast(Counters, comm.allgather_object(counters)[0])

    def _fetch(self, client: Client, x: Array, buffers: int, workers: int) -> Counters:
        """Take the vectors; the counters."""
        self.vectors = array_module(x).empty((1 + buffers, x.size), x.dtype)
        rows = []
        answers = [answer.body for answer in client.ask_all(Kind.PULL_STATE)]
        for part, body in zip(client.parts, answers, strict=True):
            for i, vector in enumerate(self.vectors):
                part.put(body[i * part.bytes : (i + 1) * part.bytes].view(x.dtype), vector)
            rows.append(body[len(self.vectors) * part.bytes :].copy().view(np.int64))
        counters = np.stack(rows)
        clocks = counters[:, COUNTERS : COUNTERS + workers]
        assert (clocks == clocks[0]).all(), f"servers disagree on workers' pushes: {clocks}"
        client.ask_all(Kind.COPY_TABLES)
        return counters

    def start_from(
        self, x: Array, optimizer: OptimizerState, buffers: int, servers: int, comm: Communicator
    ) -> None:
        """Make it that of servers to which nobody has pushed, and which go on from worker 0. Local.

        Args:
            x: [n], the model.
            optimizer: which has come to it: the servers' has its vectors, steps and samples.
            buffers: as for `collect`: 0 where the servers' has no vectors.
        """
        own = [optimizer.buffers[name] for name in sorted(optimizer.buffers)[:buffers]]
        self.vectors = array_module(x).stack([x, *own]) if comm.rank == 0 else None
        self.counters = np.zeros((servers, COUNTERS + OF_EACH_WORKER * comm.size), np.int64)
        self.counters[:, 1:COUNTERS] = optimizer.steps, optimizer.samples

    def fits(self, comm: Communicator) -> bool:
        """Whether it is of as many workers."""
        columns = COUNTERS + OF_EACH_WORKER * comm.size
        return self.counters is None or self.counters.shape[1] == columns

    def reset_workers(self, comm: Communicator) -> tuple[int, Array]:
        """Make it one of these workers, who all begin anew from the model that servers held.

        Returns:
            How many workers there were, and that model [n].
        """
        assert self.counters is not None and self.vectors is not None
        before, columns = self.counters, COUNTERS + OF_EACH_WORKER * comm.size
        self.counters = np.zeros((len(before), columns), np.int64)
        self.counters[:, 1:COUNTERS] = before[:, 1:COUNTERS]
        return (before.shape[1] - COUNTERS) // OF_EACH_WORKER, self.vectors[0]

    def restore(self, client: Client, models: Sequence[Array], comm: Communicator) -> None:
        """Give it back to servers, of which there may be another number. Collective.

        Args:
            models: [n] each, what this worker's next pushes are of, where servers must know.
        Raises:
            UserError: it has not been collected.
        """
        if self.counters is None:
            raise UserError("a state of after learner.finish() lacks what servers held")
        counters = self.counters
        if len(counters) != client.servers:
            counters = np.tile(counters[:1], (client.servers, 1))

        def push() -> None:
            if comm.rank == 0:
                assert self.vectors is not None
                client.push_parts(Kind.PUSH_STATE, self.vectors, list(counters))

        comm.together(push)
        client.clock = int(counters[0, COUNTERS + comm.rank])
        client.versions = counters[:, COUNTERS + 2 * comm.size + comm.rank].tolist()
        if models:
            client.push_parts(Kind.PUSH_BACKUP, models)
        self.discard()
