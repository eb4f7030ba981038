"""Contenders and their model, minibatches and optimizers: the same in both measurements."""

from __future__ import annotations

from dataclasses import dataclass
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
from parallel_sgd.data import library_source
from parallel_sgd.models import ByteLanguageModel
from parallel_sgd.planning import Job
from parallel_sgd.planning.candidates import Blocks, Candidate, DataParallel, Servers

from ..convergence.task import Held, Task, some_of

BATCH = 256  #: samples of each worker in a minibatch
CONTEXT = 8  #: bytes from which the next one is predicted
CLASSES = 256
WIDTHS = (384, 384)
READ = 6_000_000  #: bytes of Python's library
TESTED = 4_096  #: samples
PERIOD = 8  #: minibatches of a worker in a block of local updates
PUSHES = 4  #: minibatches of a worker between two pushes

TITLE = f"next byte of Python's library, MLP {CONTEXT}x16-{'-'.join(map(str, WIDTHS))}-{CLASSES}"


def model(seed: int = 0) -> ByteLanguageModel:
    """Make the model of a seed."""
    return ByteLanguageModel(CONTEXT, 16, list(WIDTHS), seed=seed)


def data(samples: int, seed: int) -> tuple[Held, Held]:
    """Return `samples` training samples, and the test samples."""
    parts = library_source(CONTEXT, most_bytes=READ)
    return some_of(parts, (samples, TESTED), seed)


TASK = Task(
    title=TITLE,
    minibatch=BATCH,
    classes=CLASSES,
    data=lambda seed, samples: data(samples, seed),
    model=model,
    warm_up=1 / 16,
)


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
        period: minibatches of a worker between exchanges.
        servers: hosts beside those of the workers.
    """

    style: tuple[str, str]
    algorithm: Algorithm[Any]
    candidate: Candidate | None
    optimizer: str = "momentum"
    period: int = 1
    servers: int = 0


def _blocks(
    color: str, marker: str, algorithm: type[LocalUpdates], optimizer: str = "momentum"
) -> Contender:
    candidate = ShortBlocks(32, algorithm)
    return Contender((color, marker), algorithm(sync_steps=PERIOD), candidate, optimizer, PERIOD)


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
        period=PUSHES,
        servers=1,
    ),
}
