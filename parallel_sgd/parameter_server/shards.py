"""What servers and workers have of a model where ranks have died, put together again.

Slices of servers that are left come from these, with their optimizer's buffers; those of a server
that has died come from the newest copy that a worker has pulled, and buffers for them are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..communication import Communicator
from ..embedding import ServedTables
from .served import COUNTERS, OF_EACH_WORKER, ServedModel

HostArray = npt.NDArray[Any]
Counters = npt.NDArray[np.int64]
Runs = list[tuple[int, int]]


@dataclass
class Facts:
    """Of a holding, for all ranks.

    Attributes:
        generation: of the ranks, in which it was a server's.
        server, servers: the server's number, and how many there were.
        runs: what it holds of the model, as (start, stop).
        version, steps, samples: of the server's model, and of its optimizer.
        pushes: that have changed the model, by worker.
        clocks: pushes that have come and are not waiting for a round, by worker.
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
    """One server's part.

    Attributes:
        generation, server, servers, runs: as those of its `Facts`.
        workers: their ranks in the world, for good.
        pushers: of whom `tables` knows what they have pushed, likewise.
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
    def facts(self) -> Facts:
        model, optimizer = self.model, self.model.local_step.state
        return Facts(
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


@dataclass
class WorkerProgress:
    """What a worker tells of itself.

    Attributes:
        rank: in the world, for good.
        generation: of the servers that it has last asked.
        versions: of their models, as it has them, by server.
        clock: its pushes, without one that is under way.
        samples: seen by all workers, as servers have last said.
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
        vectors: [n] each: the model, and the optimizer's buffers in the order of their names.
        version, steps, samples: of all servers from now on.
        missing: bool [n], what of the model no server has any more.
        held: what the ranks hold, the newest last.
    """

    vectors: list[HostArray]
    version: int
    steps: int
    samples: int
    missing: npt.NDArray[np.bool_]
    held: list[Facts]

    @property
    def lost(self) -> int:
        """Values of the model that no server has any more."""
        return int(self.missing.sum())

    def lag(self, pulled: WorkerProgress) -> int:
        """How often the model has changed since a worker has pulled it."""
        lags = [
            facts.version - pulled.versions[facts.server]
            for facts in self.held
            if facts.generation == pulled.generation
        ]
        return max(lags, default=0)

    def counters(self, workers: Sequence[WorkerProgress]) -> Counters:
        """Of every server, as `ServedModel.state` has them."""
        pushes = [
            max((facts.pushes.get(its.rank, 0) for facts in self.held), default=its.clock)
            for its in workers
        ]
        pulled = [max(0, self.version - self.lag(its)) for its in workers]
        clocks = [its.clock for its in workers]
        own = [self.version, self.steps, self.samples, *clocks, *pushes, *pulled, *pulled]
        assert len(own) == COUNTERS + OF_EACH_WORKER * len(workers)
        return np.array(own, np.int64)


def assemble(
    world: Communicator,
    shards: Sequence[Shard],
    workers: Sequence[WorkerProgress | None],
    copy: HostArray,
    buffers: int,
) -> Assembled:
    """Put the model together on every rank.

    Args:
        world: all ranks.
        holdings: this rank's.
        workers: of every rank of `world`; None for one that is none, or knows nothing yet.
        copy: [n], the model as this rank's worker has last pulled it.
        buffers: how many the servers' optimizer has.

    Collective. Cost: every rank is sent the whole model with the buffers.
    """
    own_facts = [list(vars(holding.facts).values()) for holding in shards]
    everybody = [[Facts(*plain) for plain in its] for its in world.allgather_object(own_facts)]
    every = [
        (facts, rank, number)
        for rank, theirs in enumerate(everybody)
        for number, facts in enumerate(theirs)
    ]
    every.sort(key=lambda entry: entry[0].generation)
    held = [facts for facts, _, _ in every]
    missing = np.ones(copy.size, bool)
    for facts in held:
        for start, stop in facts.runs:
            missing[start:stop] = False
    vectors = [np.zeros_like(copy) for _ in range(1 + buffers)]
    known = [its for its in workers if its is not None]
    if missing.any():
        newest = max(known, key=lambda its: (its.generation, sum(its.versions)), default=None)
        root = 0 if newest is None else workers.index(newest)
        whole = copy.copy()
        world.broadcast(whole, root)
        vectors[0][...] = whole
    for facts, rank, number in every:
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
        max([version, *(v for its in known for v in its.versions)]),
        max((facts.steps for facts in held), default=version),
        max((facts.samples for facts in held), default=max((w.samples for w in known), default=0)),
        missing,
        held,
    )
