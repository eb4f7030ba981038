"""Assembly of the model from servers and workers after ranks have failed.

The remaining servers provide their slices and optimizer buffers. A failed server's slices come from
the newest model pulled by any worker, with zero buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..communication import Communicator
from ..communication.serialization import message
from ..embedding import ServedTables
from .served import COUNTERS_PER_WORKER, SERVER_COUNTERS, ServedModel

HostArray = npt.NDArray[Any]
Counters = npt.NDArray[np.int64]
Runs = list[tuple[int, int]]


@message
@dataclass
class ShardFacts:
    """Description of a shard, sent to all ranks.

    Attributes:
        generation: of the ranks, when the shard's server was formed.
        server, servers: number of the server, and the number of servers.
        runs: the shard's ranges of the flat vector, as (start, stop).
        version, steps, samples: of the server's model and optimizer.
        pushes: number of pushes that have changed the model, by the worker's fixed rank.
        clocks: number of pushes that have arrived and wait for no round, by the worker's fixed
            rank.
    """

    generation: int
    server: int
    servers: int
    runs: Runs
    version: int
    steps: int
    samples: int
    pushes: dict[int, int]
    clocks: dict[int, int]


@dataclass
class Shard:
    """A server's part of the model and of the tables.

    A fixed rank is a rank's number in the world, unchanged by failures (`world_ranks`).

    Attributes:
        generation, server, servers, runs: as in `ShardFacts`.
        workers: fixed ranks of the workers, ordered by worker number.
        pushers: fixed ranks of the workers with pushes in `tables`, ordered by number there.
    """

    generation: int
    server: int
    servers: int
    runs: Runs
    workers: tuple[int, ...]
    model: ServedModel
    tables: ServedTables
    pushers: tuple[int, ...]

    @property
    def facts(self) -> ShardFacts:
        model, optimizer = self.model, self.model.local_step.state
        return ShardFacts(
            self.generation,
            self.server,
            self.servers,
            self.runs,
            model.version,
            optimizer.steps,
            optimizer.samples,
            dict(zip(self.workers, model.pushes, strict=True)),
            {rank: model.finished_clock(k) for k, rank in enumerate(self.workers)},
        )


@message
@dataclass
class WorkerProgress:
    """A worker's own account of its progress.

    Attributes:
        rank: fixed rank.
        generation: of the latest servers that have answered this worker.
        versions: of the models on this worker, by server.
        clock: number of pushes, without a push under way.
        samples: seen by all workers, by the servers' latest answer.
    """

    rank: int
    generation: int
    versions: list[int]
    clock: int
    samples: int


@dataclass
class Assembled:
    """The whole model.

    Attributes:
        vectors: [n] each: the model, and the optimizer's buffers ordered by name.
        version, steps, samples: of all servers from now on.
        missing: bool [n], True for values of the model on no remaining server.
        held: facts of all shards, ordered by generation.
    """

    vectors: list[HostArray]
    version: int
    steps: int
    samples: int
    missing: npt.NDArray[np.bool_]
    held: list[ShardFacts]

    @property
    def lost(self) -> int:
        """Number of values of the model on no remaining server."""
        return int(self.missing.sum())

    def lag(self, pulled: WorkerProgress) -> int:
        """Return the number of changes of the model since a worker's pull."""
        lags = [
            facts.version - pulled.versions[facts.server]
            for facts in self.held
            if facts.generation == pulled.generation
        ]
        return max(lags, default=0)

    def counters(self, workers: Sequence[WorkerProgress]) -> Counters:
        """Return the counters of every server, as in `ServedModel.state`."""
        pushes = [
            max((facts.pushes.get(worker.rank, 0) for facts in self.held), default=worker.clock)
            for worker in workers
        ]
        pulled = [max(0, self.version - self.lag(worker)) for worker in workers]
        clocks = [worker.clock for worker in workers]
        own = [self.version, self.steps, self.samples, *clocks, *pushes, *pulled, *pulled]
        assert len(own) == SERVER_COUNTERS + COUNTERS_PER_WORKER * len(workers)
        return np.array(own, np.int64)


def assemble(
    world: Communicator,
    shards: Sequence[Shard],
    workers: Sequence[WorkerProgress | None],
    copy: HostArray,
    buffers: int,
) -> Assembled:
    """Assemble the model on every rank.

    Args:
        world: all ranks.
        shards: of this rank.
        workers: progress of every rank of `world`. None for a server or a rank that has just
            joined.
        copy: [n], the model as last pulled by this rank's worker.
        buffers: number of buffers of the servers' optimizer.

    Collective. Cost: every rank receives the whole model with the buffers.
    """
    all_facts: list[list[ShardFacts]] = world.allgather_object([shard.facts for shard in shards])
    entries = [
        (facts, rank, number)
        for rank, rank_facts in enumerate(all_facts)
        for number, facts in enumerate(rank_facts)
    ]
    entries.sort(key=lambda entry: entry[0].generation)
    held = [facts for facts, _, _ in entries]
    missing = np.ones(copy.size, bool)
    for facts in held:
        for start, stop in facts.runs:
            missing[start:stop] = False
    vectors = [np.zeros_like(copy) for _ in range(1 + buffers)]
    known = [progress for progress in workers if progress is not None]
    if missing.any():
        newest = max(known, key=lambda w: (w.generation, sum(w.versions)), default=None)
        root = 0 if newest is None else workers.index(newest)
        whole = copy.copy()
        world.broadcast(whole, root)
        vectors[0][...] = whole
    for facts, rank, number in entries:
        size = sum(stop - start for start, stop in facts.runs)
        own = shards[number].model.vectors if rank == world.rank else []
        for i, vector in enumerate(vectors):
            values = own[i].copy() if own else np.empty(size, copy.dtype)
            world.broadcast(values, rank)
            at = 0
            for start, stop in facts.runs:
                vector[start:stop] = values[at : at + stop - start]
                at += stop - start
    version = max((facts.version for facts in held), default=0)
    return Assembled(
        vectors,
        max([version, *(v for w in known for v in w.versions)]),
        max((facts.steps for facts in held), default=version),
        max((facts.samples for facts in held), default=max((w.samples for w in known), default=0)),
        missing,
        held,
    )
