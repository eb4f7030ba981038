"""One run: K logical ranks train one model in the thread world."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from parallel_sgd import Communicator, UserError, simulate
from parallel_sgd.data import Source
from parallel_sgd.schedules import Linear

from .contenders import CONTENDERS, Options
from .optimizers import OPTIMIZERS
from .task import ERROR, Score, Task
from .tasks import TASKS

LAST_RATE = 0.1
"""The learning rate falls linearly, to this part of the highest, which is the first one but where a
task has a warm-up: there it begins with this part, too."""

FIRST_TUNING_SEED = 1000
"""Rates are chosen on seeds from here on; those below are reported."""


@dataclass(frozen=True)
class Run:
    """The parameters of a run, which decide every bit.

    Attributes:
        task, contender, optimizer: by name.
        ranks: how many.
        lr: the highest learning rate.
        options: of the algorithm, beyond the contender's fixed ones.
        seed: of the initial model, the data's split and their order.
        samples: of all ranks.
    """

    task: str
    contender: str
    optimizer: str
    ranks: int
    lr: float
    options: Options
    seed: int
    samples: int


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        losses: test loss in nats at each of the task's points; of a seed to tune on, at the end.
        bytes_sent: by all ranks together.
        errors: in %, for tasks measured by errors; likewise.
    """

    losses: tuple[float, ...]
    bytes_sent: int
    errors: tuple[float, ...] = ()

    def curve(self, task: Task) -> tuple[float, ...]:
        """Return the task's measure at each of its points."""
        return self.errors if task.measure == ERROR else self.losses


def train(run: Run) -> Outcome:
    """Carry a run out. Losses are at most the task's `ceiling`, also after a run has broken off."""
    task, contender = TASKS[run.task], CONTENDERS[run.contender]
    training, test = task.data(run.seed, run.samples)
    low, warm = LAST_RATE * run.lr, round(task.warm_up * run.samples)
    rate = Linear({0: low} | {warm: run.lr, run.samples: low})  # without warm-up 0 means the latter
    points = 1 if run.seed >= FIRST_TUNING_SEED else task.points
    scores: list[Score] = []

    def one_rank(comm: Communicator) -> int:
        trained = task.trained(run.seed, OPTIMIZERS[run.optimizer], rate, algorithm, comm)
        learner = trained.learner
        source = Source(
            training,
            minibatch_size=task.minibatch * comm.size,
            epochs=-(-run.samples // len(training)),
            seed=run.seed,
            dtype=None,
        )
        for x, y in source.minibatches(learner):
            trained.step(x, y)
            at_point = learner.samples % (run.samples // points) == 0
            if at_point and (score := trained.score(test)):
                scores.append(score)
            if learner.samples == run.samples:
                break
        learner.finish()
        return learner.bytes_sent

    sent = 0
    with contender.known():
        algorithm = contender.algorithm(run.options, task.block, run.samples)
        try:
            sent = sum(simulate(run.ranks, one_rank))
        except UserError:  # it has diverged
            scores += [Score(math.inf, math.inf)] * (points - len(scores))
    assert len(scores) == points, "minibatches do not end at the points"
    losses = _at_most(task.ceiling, [score.loss for score in scores])
    errors = [score.error for score in scores] if task.measure == ERROR else []
    return Outcome(losses, sent, _at_most(task.worst, errors))


def _at_most(limit: float, values: list[float]) -> tuple[float, ...]:
    ended = np.nan_to_num(values, nan=math.inf, posinf=math.inf)
    return tuple(np.minimum(ended, limit).round(4).tolist())
