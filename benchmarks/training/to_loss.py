"""Seconds of training until a test loss is reached, on the next byte of Python's library.

The steps to the loss do not depend on the links; the seconds of a step do. Steps are counted on
links without a limit, with a learning rate tuned for each contender.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from parallel_sgd import Communicator

from ..study import Search
from .contenders import CONTENDERS, PERIOD
from .tasks import BYTES, TEXT
from .turns import Ranks, playing

EVERY = PERIOD  #: steps between two looks at the test loss
MOST_STEPS = 1024
TUNING_SEED = 1000  #: rates are chosen on it; those from 0 on are reported
START_LR = 0.1  #: where the search of a learning rate begins, by factors of 2


class Goal(NamedTuple):
    """A task by name, and test losses in nats, in falling order."""

    task: str
    targets: tuple[float, ...]


def goal_of(modules: bool) -> Goal:
    """Return the goal for our own models, or for PyTorch's."""
    return Goal(TEXT, (2.7, 2.5, 2.4)) if modules else Goal(BYTES, (2.4, 2.1, 1.95))


@dataclass(frozen=True)
class Learned:
    """A run.

    Attributes:
        contender, lr, seed: of the run.
        curve: (steps, test loss) at every test, until the last target, divergence or `MOST_STEPS`.
    """

    contender: str
    lr: float
    seed: int
    curve: list[tuple[int, float]]

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return self.curve[-1][0] if self.curve else 0

    def steps_to(self, target: float) -> float:
        """Return the steps until the test loss first reached a target; infinite: never."""
        return next((steps for steps, loss in self.curve if loss <= target), math.inf)


Wanted = tuple[str, float | None, list[int]]
"""A contender's runs: its name, the learning rate (None: to be tuned), and seeds."""


def measure(comm: Communicator, wanted: list[Wanted], modules: bool) -> list[dict[str, Any]]:
    """Return the fields of a `Learned` for each wanted run."""
    goal, runs = goal_of(modules), []
    with playing(comm, [name for name, *_ in wanted], modules) as ranks:
        for name, known_lr, seeds in wanted:
            lr = known_lr or tuned(ranks, goal, name)
            runs += [learn(ranks, goal, name, lr, seed) for seed in seeds]
    return [vars(run) for run in runs]


def missing_runs(names: Iterable[str], seeds: int, known: Sequence[Learned]) -> list[Wanted]:
    """Return the runs without which the steps of these contenders are not known."""
    wanted: list[Wanted] = []
    for name in dict.fromkeys(CONTENDERS[name].learns_as or name for name in names):
        there = {run.seed: run.lr for run in known if run.contender == name}
        if missing := [seed for seed in range(seeds) if seed not in there]:
            wanted.append((name, next(iter(there.values()), None), missing))
    return wanted


def learn(
    ranks: Ranks, goal: Goal, name: str, lr: float, seed: int, most_steps: float = MOST_STEPS
) -> Learned:
    """Train by a contender until the last target, or `most_steps`. Collective."""
    curve: list[tuple[int, float]] = []
    with ranks.training(name, goal.task, lr, seed) as turn:
        for steps in range(EVERY, math.ceil(most_steps / EVERY) * EVERY + 1, EVERY):
            if not np.isfinite(turn.steps(EVERY)[1]).all():
                break
            curve.append((steps, round(turn.test_loss(), 4)))
            if not curve[-1][1] > goal.targets[-1]:
                break
    return Learned(name, lr, seed, curve)


def tuned(ranks: Ranks, goal: Goal, name: str) -> float:
    """Find the learning rate with the fewest steps to the last target, by factors of 2.

    A run with more steps than the best run so far is ended.
    """
    search = Search(0)
    while points := search.next_points():
        for i in points:
            fewest = min((steps for steps, _ in search.scores.values()), default=math.inf)
            most = min(fewest, MOST_STEPS)
            run = learn(ranks, goal, name, START_LR * 2.0**i, TUNING_SEED, most)
            last = run.curve[-1][1] if run.curve else math.inf
            search.scores[i] = run.steps_to(goal.targets[-1]), last
    return START_LR * 2.0**search.best


class ToLoss(NamedTuple):
    """A contender's way to a test loss.

    Attributes:
        reached: whether most seeds reached the target.
        steps: the median of the seeds, to the target or to the end.
        seconds: of these steps.
    """

    contender: str
    target: float
    reached: bool
    steps: float
    seconds: float


def to_losses(goal: Goal, name: str, step_s: float, runs: Sequence[Learned]) -> list[ToLoss]:
    """Return a contender's way to every target, by steps of `step_s` seconds."""
    own = [run for run in runs if run.contender == (CONTENDERS[name].learns_as or name)]
    found = []
    for target in goal.targets:
        steps = statistics.median(run.steps_to(target) for run in own)
        if not (reached := steps < math.inf):
            steps = statistics.median(run.steps for run in own)
        found.append(ToLoss(name, target, reached, steps, steps * step_s))
    return found
