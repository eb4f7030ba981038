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
        style: color and marker in figures.
        algorithm: with all its options.
        candidate: of the planner; None: unknown to the planner.
        optimizer: by its name in `OPTIMIZERS`.
        servers: hosts beside those of the workers.
    """

    style: tuple[str, str]
    algorithm: Algorithm[Any]
    candidate: Candidate | None
    optimizer: str = "momentum"
    servers: int = 0


def _blocks(
    color: str, marker: str, algorithm: type[LocalUpdates], optimizer: str = "momentum"
) -> Contender:
    candidate = ShortBlocks(32, algorithm)
    return Contender((color, marker), algorithm(sync_steps=PERIOD), candidate, optimizer)


SERIAL = "32 bit"  #: what is serial SGD where there is one worker

#: In the order of tables. Okabe and Ito's colors, which colour-blind people can tell apart, and one
#: of Tol's.
CONTENDERS = {
    SERIAL: Contender(("#000000", "o"), DataParallelSGD(), DataParallel(32)),
    "4 bit": Contender(("#0072B2", "s"), DataParallelSGD(gradient_bits=4), DataParallel(4)),
    "1 bit": Contender(("#56B4E9", "D"), DataParallelSGD(gradient_bits=1), DataParallel(1)),
    "PowerSGD rank 4": Contender(("#009E73", "^"), PowerSGD(rank=4), None),
    "block momentum": _blocks("#D55E00", "P", BlockMomentumSGD),
    "model averaging": _blocks("#E69F00", "v", ModelAveragingSGD),
    "SlowMo": _blocks("#CC79A7", "X", SlowMo),
    "DiLoCo (Adam)": _blocks("#882255", "h", DiLoCo, "Adam"),
    "asynchronous": Contender(
        *(("#7F7F7F", "*"), DataParallelASGD(servers=1, sync_steps=PUSHES), OneServer(32)),
        optimizer="SGD",
        servers=1,
    ),
}
