"""Seconds of training until a test loss is reached, on the next byte of Python's library.

The steps to the loss do not depend on the links; the seconds of a step do. Steps are counted on
links without a limit, with a learning rate tuned for each contender.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from parallel_sgd import UserError

from ..study import Search
from .conductor import Conductor
from .contenders import CONTENDERS, PERIOD, PLAIN, side
from .step_times import StepTime
from .tasks import BYTES, TASKS, TEXT

EVERY = PERIOD  #: steps between two looks at the test loss
MOST_STEPS = 1024
TUNING_SEED = 1000  #: rates are chosen on it; those from 0 on are reported
SAME = 1e-4  #: of losses on both sides, relative


@dataclass(frozen=True)
class Goal:
    """
    Attributes:
        task: by name.
        targets: test losses in nats, in falling order.
        start: the learning rate at which the search begins, by factors of 2.
    """

    task: str
    targets: tuple[float, ...]
    start: float


MLP_GOAL = Goal(BYTES, (2.4, 2.1, 1.95), 0.1)
TRANSFORMER_GOAL = Goal(TEXT, (2.7, 2.5, 2.4), 0.1)


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


def learn(
    conductor: Conductor,
    goal: Goal,
    name: str,
    lr: float,
    seed: int,
    most_steps: float = MOST_STEPS,
) -> Learned:
    """Train a contender until the last target, or `most_steps`."""
    who = side(name)
    conductor.all(who, "begin", contender=name, task=goal.task, lr=lr, seed=seed)
    steps, curve = 0, []
    while steps < most_steps:
        answers = conductor.all(who, "steps", count=EVERY)
        if not np.isfinite([answer["losses"] for answer in answers]).all():
            break
        steps += EVERY
        loss = round(conductor.first(who, "evaluate")["loss"], 4)
        curve.append((steps, loss))
        if not loss > goal.targets[-1]:
            break
    conductor.all(who, "end")
    return Learned(name, lr, seed, curve)


def tuned(conductor: Conductor, goal: Goal, name: str) -> float:
    """Find the learning rate with the fewest steps to the last target, by factors of 2.

    A run with more steps than the best run so far is ended.
    """
    search = Search(0)
    while points := search.next_points():
        for i in points:
            fewest = min((steps for steps, _ in search.scores.values()), default=math.inf)
            lr, most = goal.start * 2.0**i, min(fewest, MOST_STEPS)
            run = learn(conductor, goal, name, lr, TUNING_SEED, most)
            last = run.curve[-1][1] if run.curve else math.inf
            search.scores[i] = run.steps_to(goal.targets[-1]), last
    return goal.start * 2.0**search.best


def learn_all(
    conductor: Conductor, goal: Goal, names: Iterable[str], seeds: int, known: Sequence[Learned]
) -> list[Learned]:
    """Return all runs of the contenders, and of their equals in learning; known runs are kept."""
    runs = list(known)
    for name in learners_for(names):
        there = {run.seed: run for run in runs if run.contender == name}
        missing = [seed for seed in range(seeds) if seed not in there]
        if missing:
            lr = next(iter(there.values())).lr if there else tuned(conductor, goal, name)
            runs += [learn(conductor, goal, name, lr, seed) for seed in missing]
    return runs


def learners_for(names: Iterable[str]) -> list[str]:
    """Return the contenders whose runs give the steps of all of these."""
    return list(dict.fromkeys(CONTENDERS[name].learns_as or name for name in names))


def timed_for(names: Iterable[str]) -> list[str]:
    """Return the contenders whose times give the seconds of all of these."""
    parts = [[part for _, part in CONTENDERS[name].timed_as] or [name] for name in names]
    return list(dict.fromkeys(part for several in parts for part in several))


def seconds(name: str, steps: float, times: Mapping[str, StepTime], ranks: int) -> float:
    """Return the seconds of a contender's first steps."""
    parts = CONTENDERS[name].timed_as or ((0, name),)
    together = ranks * TASKS[times[parts[0][1]].model].batch
    starts = [samples / together for samples, _ in parts]
    return sum(
        max(0.0, min(steps, end) - start) * times[part].seconds
        for (_, part), (start, end) in zip(parts, pairwise([*starts, math.inf]), strict=True)
    )


@dataclass(frozen=True)
class ToLoss:
    """
    Attributes:
        contender, rate, target: of the way to a test loss, on links of a rate in bits/s.
        reached: whether most seeds reached the target.
        steps: the median of the seeds, to the target or to the end.
        seconds: of these steps.
        lr: the tuned rate.
    """

    contender: str
    rate: float
    target: float
    reached: bool
    steps: float
    seconds: float
    lr: float


def to_losses(
    goal: Goal,
    name: str,
    rate: float,
    times: Mapping[str, StepTime],
    runs: Sequence[Learned],
    ranks: int,
) -> list[ToLoss]:
    """Return a contender's way to every target, on links with these step times."""
    own = [run for run in runs if run.contender == (CONTENDERS[name].learns_as or name)]
    found = []
    for target in goal.targets:
        steps = statistics.median(run.steps_to(target) for run in own)
        if not (reached := steps < math.inf):
            steps = statistics.median(run.steps for run in own)
        taken = seconds(name, steps, times, ranks)
        found.append(ToLoss(name, rate, target, reached, steps, taken, own[0].lr))
    return found


def require_same_step(conductor: Conductor, goal: Goal) -> None:
    """Check that both sides have the same losses before and after a step in full precision.

    Raises:
        UserError: the losses differ by more than rounding.
    """
    losses = []
    for name in ("32 bit", PLAIN):
        conductor.all(side(name), "begin", contender=name, task=goal.task, lr=goal.start)
        losses.append(conductor.all(side(name), "steps", count=2)[0]["losses"])
        conductor.all(side(name), "end")
    ours, theirs = losses
    if not np.allclose(ours, theirs, rtol=SAME, atol=0):
        raise UserError(
            "both sides must have the same losses before and after a step in full precision: "
            f"ours {ours}, PyTorch's {theirs}"
        )
