"""Contenders and their model, minibatches and optimizers: the same in both measurements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from parallel_sgd import (
    Algorithm,
    BlockMomentumSGD,
    DataParallelASGD,
    DataParallelSGD,
    DiLoCo,
    ModelAveragingSGD,
    PowerSGD,
    SlowMo,
)
from parallel_sgd.algorithms import LocalUpdates
from parallel_sgd.data import Dataset
from parallel_sgd.models import ByteLanguageModel
from parallel_sgd.planning import Job
from parallel_sgd.planning.candidates import Blocks, Candidate, DataParallel, Servers

from ..convergence.tasks import CONTEXT, TASKS
from ..panels import COLORS

BATCH = 256  #: samples of each worker in a minibatch
WIDTHS = (384, 384)
PERIOD = 8  #: minibatches of a worker in a block of local updates
PUSHES = 4  #: minibatches of a worker between two pushes

TITLE = f"next byte of Python's library, MLP {CONTEXT}x16-{'-'.join(map(str, WIDTHS))}-256"


def model(seed: int = 0) -> ByteLanguageModel:
    """Make the model of a seed."""
    return ByteLanguageModel(CONTEXT, 16, list(WIDTHS), seed=seed)


TASK = replace(TASKS["bytes-256"], title=TITLE, minibatch=BATCH, model=model)


def data(samples: int, seed: int) -> tuple[Dataset, Dataset]:
    """Return `samples` training samples, and the test samples."""
    return TASK.data(seed, samples)


@dataclass(frozen=True)
class ShortBlocks(Blocks):
    """Blocks of `PERIOD` minibatches."""

    def steps(self, job: Job) -> int:
        return PERIOD


@dataclass(frozen=True)
class OneServer(Servers):
    """A single server for any number of workers, and pushes after `PUSHES` minibatches."""

    def servers(self, job: Job) -> int:
        return 1

    def steps(self, job: Job) -> int:
        return PUSHES


@dataclass(frozen=True)
class Contender:
    """
    Attributes:
        color: in figures.
        algorithm: with all its options.
        candidate: of the planner; None: unknown to the planner.
        optimizer: by its name in `OPTIMIZERS`.
        servers: hosts beside those of the workers.
    """

    color: str
    algorithm: Algorithm[Any]
    candidate: Candidate | None
    optimizer: str = "momentum"
    servers: int = 0


def _blocks(color: str, algorithm: type[LocalUpdates], optimizer: str = "momentum") -> Contender:
    candidate = ShortBlocks(32, algorithm)
    return Contender(color, algorithm(sync_steps=PERIOD), candidate, optimizer)


SERIAL = "32 bit"  #: what is serial SGD where there is one worker

#: In the order of tables.
CONTENDERS = {
    SERIAL: Contender(COLORS["32 bit"], DataParallelSGD(), DataParallel(32)),
    "4 bit": Contender(COLORS["4 bit"], DataParallelSGD(gradient_bits=4), DataParallel(4)),
    "1 bit": Contender(COLORS["1 bit"], DataParallelSGD(gradient_bits=1), DataParallel(1)),
    "PowerSGD rank 4": Contender(COLORS["PowerSGD"], PowerSGD(rank=4), None),
    "block momentum": _blocks(COLORS["block momentum"], BlockMomentumSGD),
    "model averaging": _blocks(COLORS["model averaging"], ModelAveragingSGD),
    "SlowMo": _blocks(COLORS["SlowMo"], SlowMo),
    "DiLoCo (Adam)": _blocks(COLORS["DiLoCo"], DiLoCo, "Adam"),
    "asynchronous": Contender(
        *(COLORS["asynchronous"], DataParallelASGD(servers=1, sync_steps=PUSHES), OneServer(32)),
        optimizer="SGD",
        servers=1,
    ),
}
