"""Families: the algorithms in training under faults, each with its way to recover."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import parallel_sgd as psgd


@dataclass(frozen=True)
class Family:
    """An algorithm under faults.

    Attributes:
        algorithm: makes it.
        lr: of plain SGD.
        servers: how many of the ranks serve.
        repeats: whether the final model has the same bits in every undisturbed run.
        repeats_replaced: whether also after a spare has taken a failed rank's place.
        saves: whether the ranks write checkpoints. Asynchronous workers would wait there for a
            failed worker.
        victims: the ranks that fail.
        session: whether a `TrainingSession` trains, and not a loop.
    """

    algorithm: Callable[[], psgd.Algorithm[Any]]
    lr: float = 0.3
    servers: int = 0
    repeats: bool = True
    repeats_replaced: bool = False
    saves: bool = True
    victims: Literal["any", "worker", "server"] = "any"
    session: bool = False

    def ranks(self, ranks: int) -> range:
        """Return the ranks that may fail."""
        workers = ranks - self.servers
        return {"any": range(ranks), "worker": range(workers), "server": range(workers, ranks)}[
            self.victims
        ]


def _served(mode: str, servers: int) -> Callable[[], psgd.Algorithm[Any]]:
    return lambda: psgd.DataParallelASGD(mode=mode, servers=servers, sync_steps=2, merge="mean")


FAMILIES = {
    "32-bit": Family(lambda: psgd.DataParallelSGD(), repeats_replaced=True),
    "session": Family(lambda: psgd.DataParallelSGD(), repeats_replaced=True, session=True),
    "1-bit": Family(lambda: psgd.DataParallelSGD(gradient_bits=1, code="sign")),
    "entropy": Family(lambda: psgd.DataParallelSGD(gradient_bits=1)),
    "overlap": Family(lambda: psgd.DataParallelSGD(gradient_bits=4, overlap=True)),
    "double-buffering": Family(
        lambda: psgd.DataParallelSGD(gradient_bits=4, double_buffering=True), lr=0.1
    ),
    "model-averaging": Family(lambda: psgd.ModelAveragingSGD(block_samples=640)),
    "block-momentum": Family(lambda: psgd.BlockMomentumSGD(block_samples=640)),
    "async-worker": Family(
        _served("async", 1), servers=1, repeats=False, saves=False, victims="worker"
    ),
    "async-server": Family(_served("async", 2), servers=2, repeats=False, victims="server"),
    "async-session": Family(
        _served("async", 1), servers=1, repeats=False, saves=False, session=True
    ),
    "sync-worker": Family(_served("sync", 1), servers=1, saves=False, victims="worker"),
    "sync-server": Family(_served("sync", 2), servers=2, victims="server"),
}
SYNCHRONOUS = tuple(name for name, family in FAMILIES.items() if not family.servers)
"""Those whose ranks are all alike."""
