"""The servers' state as a part of the workers' state, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..kernels import array_module
from ..local_step import OptimizerState
from ..state import across
from .client import Client
from .roles import ServerGroup
from .served import COUNTERS_PER_WORKER, SERVER_COUNTERS
from .wire import LARGEST, Kind

Array = Any  #: a NumPy or CuPy array
Counters = npt.NDArray[np.int64]


@dataclass
class ServedState:
    """The servers' state.

    Attributes:
        vectors: [1 + buffers, n]: the model, then the optimizer's buffers ordered by name, in the
            order of the flat vector, whatever the placement. On worker 0 after `collect`, else
            None.
        counters: int64 [servers, 3 + 4 workers]. For each server: its version, the optimizer's
            steps, its samples. Then for each worker: clock, pushes that changed the model, version
            of the latest pull, and version that the next push is based on (`ServedModel.state`).

    Both are None except between `collect` and the next push.
    """

    vectors: Array | None = across("same", default=None)
    counters: Counters | None = across("same", default=None)

    @staticmethod
    def check(
        saved: Mapping[str, Any], x: Array, buffers: int, workers: int, *, first: bool
    ) -> None:
        """Check that a saved state can be restored. Local.

        Args:
            saved: the saved fields by name.
            x, buffers: as for `collect`.
            workers: number of workers in the saved run.
            first: True on worker 0, the holder of the vectors.
        Raises:
            UserError: naming the invalid field.
        """
        vectors, counters = saved["vectors"], saved["counters"]
        if counters is None:
            raise UserError("a state from after learner.finish() lacks the content of servers")
        columns = SERVER_COUNTERS + COUNTERS_PER_WORKER * workers
        if counters.dtype != np.int64 or counters.ndim != 2 or counters.shape[1] != columns:
            raise UserError(f"has algorithm.served.counters that are no int64 [servers, {columns}]")
        if not len(counters) or counters.min() < 0 or counters.max() > LARGEST // 2:
            raise UserError(
                "has algorithm.served.counters that are missing, less than 0, or more than any run"
            )
        clocks = counters[:, SERVER_COUNTERS : SERVER_COUNTERS + workers]
        if (clocks != clocks[0]).any():
            raise UserError("has algorithm.served.counters that differ in how often workers pushed")
        shape = (1 + buffers, x.size)
        if first and (vectors is None or (vectors.shape, vectors.dtype) != (shape, x.dtype)):
            raise UserError(f"has algorithm.served.vectors that are no {x.dtype} {list(shape)}")

    def discard(self) -> None:
        """Discard the state, because training continues."""
        self.vectors = self.counters = None

    def collect(self, client: Client, x: Array, buffers: int, group: ServerGroup) -> None:
        """Fetch the state at the moment when all workers have called this function. Collective.

        Args:
            x: [n], the model, for its size and dtype.
            buffers: number of buffers of the servers' optimizer.
            group: the workers.
        """
        client.meet()
        comm, workers = group.own, len(group.workers)
        counters = comm.together(  # reports a failure of worker 0 to all
            lambda: self._fetch(client, x, buffers, workers) if comm.rank == 0 else None
        )
        self.counters = cast(Counters, comm.allgather_object(counters)[0])

    def _fetch(self, client: Client, x: Array, buffers: int, workers: int) -> Counters:
        """Fetch the vectors of all servers, and return the counters."""
        self.vectors = array_module(x).empty((1 + buffers, x.size), x.dtype)
        rows = []
        with client.alone():
            answers = [answer.body for answer in client.ask_all(Kind.PULL_STATE)]
        for part, body in zip(client.parts, answers, strict=True):
            for i, vector in enumerate(self.vectors):
                part.put(body[i * part.bytes : (i + 1) * part.bytes].view(x.dtype), vector)
            rows.append(body[len(self.vectors) * part.bytes :].copy().view(np.int64))
        counters = np.stack(rows)
        clocks = counters[:, SERVER_COUNTERS : SERVER_COUNTERS + workers]
        assert (clocks == clocks[0]).all(), f"servers disagree on workers' pushes: {clocks}"
        with client.alone():
            client.ask_all(Kind.COPY_TABLES)
        return counters

    def start_from(
        self, x: Array, optimizer: OptimizerState, buffers: int, servers: int, group: ServerGroup
    ) -> None:
        """Set the state for new servers from worker 0's model and optimizer. Local.

        The state counts no pushes.

        Args:
            x: [n], the model.
            optimizer: state of worker 0's optimizer: vectors, steps and samples.
            buffers: as for `collect`: 0 if the servers' optimizer has no vectors.
            servers: number of servers.
            group: the workers.
        """
        vectors = [optimizer.buffers[name] for name in sorted(optimizer.buffers)[:buffers]]
        self.vectors = array_module(x).stack([x, *vectors]) if group.own.rank == 0 else None
        self.counters = np.zeros((servers, _columns(group)), np.int64)
        self.counters[:, 1:SERVER_COUNTERS] = optimizer.steps, optimizer.samples

    def fits(self, group: ServerGroup) -> bool:
        """Return True if the state is of the same number of workers."""
        return self.counters is None or self.counters.shape[1] == _columns(group)

    def reset_workers(self, group: ServerGroup) -> tuple[int, Array]:
        """Replace the workers' counters by zeros for the present workers.

        All workers then start anew from the servers' model.

        Returns:
            The previous number of workers, and the model [n].
        """
        assert self.counters is not None and self.vectors is not None
        before = self.counters
        self.counters = np.zeros((len(before), _columns(group)), np.int64)
        self.counters[:, 1:SERVER_COUNTERS] = before[:, 1:SERVER_COUNTERS]
        return (before.shape[1] - SERVER_COUNTERS) // COUNTERS_PER_WORKER, self.vectors[0]

    def restore(self, client: Client, models: Sequence[Array], group: ServerGroup) -> None:
        """Send the state to the servers. Their number may differ from the saved one. Collective.

        Args:
            client: of this worker.
            models: [n] each, the models that this worker's next pushes are based on, if servers
                need the models.
            group: the workers.
        Raises:
            UserError: the state has not been collected.
        """
        if self.counters is None:
            raise UserError("a state from after learner.finish() lacks the content of servers")
        counters = self.counters
        if len(counters) != client.servers:
            counters = np.tile(counters[:1], (client.servers, 1))

        def push() -> None:
            if group.own.rank == 0:
                assert self.vectors is not None
                with client.alone():
                    client.push_parts(Kind.PUSH_STATE, self.vectors, list(counters))

        group.own.together(push)
        worker, workers = group.worker, len(group.workers)
        client.clock = int(counters[0, SERVER_COUNTERS + worker])
        client.versions = counters[:, SERVER_COUNTERS + 2 * workers + worker].tolist()
        if models:
            client.push_parts(Kind.PUSH_BACKUP, models)
        self.discard()


def _columns(group: ServerGroup) -> int:
    """Return the number of a server's counters for the group's workers."""
    return SERVER_COUNTERS + COUNTERS_PER_WORKER * len(group.workers)
