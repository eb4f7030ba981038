"""One run: K logical ranks train one model in the thread world."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel_sgd import Algorithm, Communicator, Learner, UserError, simulate
from parallel_sgd.data import Dataset, Source
from parallel_sgd.schedules import Linear, Schedule

from .contenders import CONTENDERS, Options
from .optimizers import OPTIMIZERS, Rule
from .task import Score, Task
from .tasks import TASKS
from .top_k import registered

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
    """

    losses: tuple[float, ...]
    bytes_sent: int


def train(run: Run) -> Outcome:
    """Carry a run out. Losses are at most the task's worst, also after a run has broken off."""
    task, contender = TASKS[run.task], CONTENDERS[run.contender]
    points = 1 if run.seed >= FIRST_TUNING_SEED else task.points
    with registered():
        algorithm = contender.algorithm(run.options, run.samples)
        how: dict[str, Any] = {"seed": run.seed, "samples": run.samples, "points": points}
        scores, sent = scores_of(task, algorithm, run.optimizer, run.ranks, lr=run.lr, **how)
    return Outcome(tuple(np.round([loss for loss, _ in scores], 4).tolist()), sent)


class ArrayModel:
    """A model of `parallel_sgd` in training on a rank."""

    def __init__(
        self,
        make: Callable[[], Any],
        rule: Rule,
        rate: Schedule,
        algorithm: Algorithm[Any],
        comm: Communicator,
    ) -> None:
        self.model = make()
        self.learner = Learner(self.model.parameters, rule.make(rate), algorithm, comm)

    def step(self, x: Any, y: Any) -> None:
        """Train on a minibatch. Collective."""
        self.model.gradient(x, y, out=self.learner.gradient)
        self.learner.step(samples=len(x))

    def score(self, test: Dataset) -> Score | None:
        """Score the common model on rank 0; return None on all more ranks."""
        if self.learner.comm.rank:
            return None
        with self.learner.shared_model():
            loss, accuracy = self.model.evaluate(*test.arrays())
        return loss, 100 * (1 - accuracy)


def scores_of(
    task: Task,
    algorithm: Algorithm[Any],
    optimizer: str,
    ranks: int,
    *,
    lr: float,
    seed: int,
    samples: int,
    points: int = 1,
    servers: int = 0,
) -> tuple[list[Score], int]:
    """Train a model as `ranks` workers and more ranks as servers.

    Returns:
        The scores at equally distant points, the task's worst where a run has diverged; and the
        bytes sent by all ranks, 0 if the run has broken off.
    """
    training, test = task.data(seed, samples)
    low, warm = LAST_RATE * lr, round(task.warm_up * samples)
    rate = Linear({0: low} | {warm: lr, samples: low})  # without warm-up 0 means the latter
    scores: list[Score | None] = []  #: None on all ranks but 0

    kind: Any = ArrayModel
    if task.torch:
        from .torch_trained import TorchModel as kind

    def one_rank(comm: Communicator) -> int:
        model = kind(lambda: task.model(seed), OPTIMIZERS[optimizer], rate, algorithm, comm)
        learner = model.learner
        if not learner.serves:
            size, epochs = task.minibatch * learner.comm.size, -(-samples // len(training))
            source = Source(training, minibatch_size=size, epochs=epochs, seed=seed, dtype=None)
            for x, y in source.minibatches(learner):
                model.step(x, y)
                if learner.samples == samples:
                    break
                if learner.samples % (samples // points) == 0:
                    learner.meet()
                    scores.append(model.score(test))
        learner.finish()
        if not learner.serves:
            scores.append(model.score(test))
        return int(learner.bytes_sent)

    try:
        sent = sum(simulate(ranks + servers, one_rank))
        known = [score for score in scores if score]
    except UserError:  # it has diverged
        sent, lost = 0, (math.inf, math.inf)
        known = [*filter(None, scores), *points * [lost]][:points]
    assert len(known) == points, "minibatches do not end at the points"
    ended = np.nan_to_num(known, nan=math.inf, posinf=math.inf)
    return [(loss, error) for loss, error in np.minimum(ended, task.worst).tolist()], sent
