"""Families: the algorithms in training under faults, each with its way to recover."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import parallel_sgd as psgd

Victims = Literal["any", "worker", "server"]


@dataclass(frozen=True)
class Family:
    """An algorithm under faults."""

    algorithm: Callable[[], psgd.Algorithm[Any]]  #: makes the algorithm
    lr: float = 0.3  #: of plain SGD
    servers: int = 0  #: how many of the ranks serve
    repeats: bool = True  #: the final model has the same bits in every undisturbed run
    repeats_replaced: bool = False  #: also after a spare has taken a failed rank's place
    victims: Victims = "any"  #: the ranks that fail
    session: bool = False  #: a `TrainingSession` trains, and not a loop

    @property
    def saves(self) -> bool:
        """True if the ranks may write checkpoints: workers would wait there for a failed worker."""
        return not self.servers or self.victims == "server"

    def ranks(self, ranks: int) -> range:
        """Return the ranks that may fail."""
        workers = ranks - self.servers
        first = workers if self.victims == "server" else 0
        return range(first, workers if self.victims == "worker" else ranks)


def _served(mode: str, victims: Victims, session: bool = False) -> Family:
    servers = 2 if victims == "server" else 1
    algorithm = partial(
        psgd.DataParallelASGD, mode=mode, servers=servers, sync_steps=2, merge="mean"
    )
    repeats = mode == "sync"
    return Family(algorithm, servers=servers, repeats=repeats, victims=victims, session=session)


_SGD = psgd.DataParallelSGD
FAMILIES = {
    "32-bit": Family(_SGD, repeats_replaced=True),
    "session": Family(_SGD, repeats_replaced=True, session=True),
    "1-bit": Family(partial(_SGD, gradient_bits=1, code="sign")),
    "entropy": Family(partial(_SGD, gradient_bits=1)),
    "overlap": Family(partial(_SGD, gradient_bits=4, overlap=True)),
    "double-buffering": Family(partial(_SGD, gradient_bits=4, double_buffering=True), lr=0.1),
    "model-averaging": Family(partial(psgd.ModelAveragingSGD, block_samples=640)),
    "block-momentum": Family(partial(psgd.BlockMomentumSGD, block_samples=640)),
    "async-worker": _served("async", "worker"),
    "async-server": _served("async", "server"),
    "async-session": _served("async", "any", session=True),
    "sync-worker": _served("sync", "worker"),
    "sync-server": _served("sync", "server"),
}
SYNCHRONOUS = tuple(name for name, family in FAMILIES.items() if not family.servers)
