"""Contenders in training: on all ranks at once, which take steps together."""

from __future__ import annotations

import gc
import statistics
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from parallel_sgd import Communicator

from ..on_ranks import process_group
from ..timing import seconds_of
from .contenders import CONTENDERS
from .tasks import SEED, TASKS, Array, Task
from .trainers import Ours, Trainer


class Turn:
    """A contender's training from the initial model on, on all ranks: all methods are collective.

    Args:
        trainer: of this rank.
        task: gives this rank's minibatches.
        seed: of the minibatches.
    """

    def __init__(self, comm: Communicator, trainer: Trainer, task: Task, seed: int = SEED) -> None:
        self.comm, self.trainer, self.task, self.taken = comm, trainer, task, 0
        self.data = _minibatches(task, comm.rank, comm.size, seed)

    def steps(self, count: int) -> tuple[float, list[float]]:
        """Take steps; return their seconds, on the slowest rank, and the mean loss of each."""
        x, y = self.data
        losses: list[float] = []

        def step() -> None:
            t = (self.taken + len(losses)) % len(x)
            losses.append(self.trainer.step(x[t], y[t]))

        seconds = count * seconds_of(step, self.comm, repeat=count)
        self.taken += count
        of_steps = zip(*self.comm.allgather_object(losses), strict=True)
        return seconds, [statistics.fmean(of_ranks) for of_ranks in of_steps]

    def same_model(self) -> bool:
        """Return whether all ranks have the same model."""
        digest = zlib.crc32(self.trainer.values().data)
        return len(set(self.comm.allgather_object(digest))) == 1

    def test_loss(self) -> float:
        """Return the test loss of the first rank's model in nats, by the same code for all."""
        first = self.comm.rank == 0
        loss = self.task.test_loss(self.trainer.values(), *_tested(self.task)) if first else 0.0
        return float(self.comm.allgather_object(loss)[0])


@dataclass(frozen=True)
class Ranks:
    """
    Attributes:
        modules: whether PyTorch's models are trained, by all contenders.
    """

    comm: Communicator
    modules: bool = False

    @contextmanager
    def training(self, name: str, task: str, lr: float, seed: int = SEED) -> Iterator[Turn]:
        """Train by a contender for a `with` block, then free its memory. Collective."""
        turn = Turn(self.comm, self.trainer(name, task, lr, seed), TASKS[task], seed)
        yield turn
        turn.trainer.finish()
        del turn.trainer
        gc.collect()  # a learner's parts know each other

    def trainer(self, name: str, task: str, lr: float, seed: int = SEED) -> Trainer:
        """Make a contender's trainer. Collective."""
        if not self.modules and CONTENDERS[name].algorithm:
            return Ours(self.comm, name, task, lr, seed)
        from .torch_trainers import DDP, TorchOurs

        make = TorchOurs if CONTENDERS[name].algorithm else DDP
        return make(self.comm, name, task, lr, seed)


@contextmanager
def playing(comm: Communicator, names: list[str], modules: bool) -> Iterator[Ranks]:
    """Yield all that contenders need, for a `with` block: the process group of those of PyTorch."""
    wanted = modules or not all(CONTENDERS[name].algorithm for name in names)
    with process_group(comm, wanted):
        yield Ranks(comm, modules)


@cache
def _minibatches(task: Task, rank: int, ranks: int, seed: int) -> tuple[Array, Array]:
    return task.minibatches(rank, ranks, seed)


@cache
def _tested(task: Task) -> tuple[Array, Array]:
    assert task.test is not None
    return task.test()
