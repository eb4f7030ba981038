"""Shards of the model on this rank, for the assembly after the failure of a server."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...algorithms.asynchronous import DataParallelASGD
from ...algorithms.asynchronous_state import DataParallelASGDState
from ...errors import SharedPeerFailure
from ...local_step import LocalStep
from ...parameter_server import Assembled, Shard, WorkerProgress
from ...parameter_server.roles import ServerGroup
from ..consistency import ConsistencyCheck
from ..minibatch_ledger import MinibatchLedger
from .base import Recoverable


class ServedLearner(Recoverable, Protocol):
    """The interface of a `Learner` with parameter servers for a failover."""

    group: ServerGroup
    algorithm: DataParallelASGD
    state: DataParallelASGDState
    local_step: LocalStep
    bytes_sent: int
    last_samples: int
    consistency: ConsistencyCheck
    ledger: MinibatchLedger
    started: int

    @property
    def serves(self) -> bool: ...

    def announce(self, samples: int, total: int) -> None: ...


class RankShards:
    """The parts of the model that this rank serves, or has served.

    Args:
        learner: with parameter servers.

    Attributes:
        kept: the shards, the newest last.
        generation: of the latest servers with this rank; -1 if there are none.
        workers: of that generation, by original world rank.

    Local.
    """

    def __init__(self, learner: ServedLearner) -> None:
        self._learner = learner
        self.kept: list[Shard] = []
        self.generation = -1
        self.workers: tuple[int, ...] = ()

    def record(self, generation: int) -> None:
        """Record the part of the model served by this rank from now on."""
        learner, world = self._learner, self._learner.world
        connection, group = learner.state.connection, learner.group
        ranks = world.world_ranks
        self.generation = generation
        self.workers = tuple(ranks[k] for k in group.workers)
        if connection.serves:
            server = connection.server
            self.kept.append(
                Shard(
                    generation,
                    group.server,
                    len(group.servers),
                    connection.runs,
                    self.workers,
                    server.model,
                    server.tables,
                    self.workers,
                )
            )

    def tables(self) -> Any:
        """Return this rank's served tables, renumbered for the present workers; None on a new
        server."""
        if not self.kept:
            return None
        ranks, held = self._learner.world.world_ranks, self.kept[-1]
        now = [ranks[k] for k in self._learner.group.workers]
        held.tables.renumber(
            {k: now.index(rank) for k, rank in enumerate(held.pushers) if rank in now}
        )
        held.pushers = tuple(now)
        return held.tables


def require_rows(learner: ServedLearner, whole: Assembled) -> None:
    """Refuse to continue if rows of tables are lost, or would have to move. Local, the same on
    all ranks."""
    if not learner.algorithm.tables:
        return
    servers = len(learner.group.servers)
    had = Counter((facts.generation, facts.servers) for facts in whole.held)
    if not any(count == of == servers for (_, of), count in had.items()):
        raise SharedPeerFailure(
            "a server has failed, and its rows of the tables are lost: run with checkpoints "
            "and `parallel-sgd run --restarts`, which continues from the newest checkpoint"
        )


def resume_client(learner: ServedLearner, whole: Assembled, workers: list[WorkerProgress]) -> None:
    """Set this worker's client to the versions and clocks of the new servers. Local."""
    state = learner.state
    progress, client = workers[learner.comm.rank], state.client
    pending = client.pending_push
    if pending is not None:
        pending.record_failure(
            _arrived(learner, whole, workers, progress, pending.clock), whole.missing
        )
    client.clock, client.samples = progress.clock, whole.samples
    client.versions = [max(0, whole.version - whole.lag(progress))] * client.servers
    if state.base is not None and progress.generation < 0:
        state.base[...] = learner.parameters.flat


def _arrived(
    learner: ServedLearner,
    whole: Assembled,
    workers: list[WorkerProgress],
    own: WorkerProgress,
    clock: int,
) -> npt.NDArray[np.bool_]:
    """Return a mask [n]: values of this worker's push, given by its clock, present on the
    remaining servers."""
    arrived = np.zeros(whole.missing.size, bool)
    if not learner.algorithm.asynchronous and clock <= max(w.clock for w in workers):
        arrived[:] = True  # a worker has the answer: its pulled model includes the round
        return arrived
    for facts in whole.held:
        if facts.generation == own.generation and facts.clocks.get(own.rank, -1) >= clock:
            for start, stop in facts.runs:
                arrived[start:stop] = True
    return arrived & ~whole.missing
