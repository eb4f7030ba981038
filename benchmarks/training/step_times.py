"""Seconds a step of every contender: in turn, several rounds, each from the beginning."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parallel_sgd import Communicator, UserError

from .contenders import CONTENDERS
from .turns import Ranks, playing

WARM_UP = 3  #: steps: memory is touched, DDP builds its buckets anew, PowerSGD has begun
LEAST_S, LEAST_STEPS = 2.0, 8  #: that are measured in a round …
MOST_S, FEWEST_STEPS = 20.0, 3  #: … unless that takes longer than this; then the fewest
LR = 0.001  #: at which all of them learn from the first steps on
SAME_LOSS = 1e-4  #: of the initial model by all contenders, relative


@dataclass(frozen=True)
class StepTime:
    """
    Attributes:
        model, rate, contender: of the measurement; the rate as on command lines.
        seconds: of a step, the median of the rounds.
        rounds: seconds of a step in each round.
    """

    model: str
    rate: str
    contender: str
    seconds: float
    rounds: list[float]


def measure(
    comm: Communicator, models: list[str], names: list[str], rounds: int, modules: bool
) -> list[dict[str, Any]]:
    """Return the fields of a `StepTime` for each model and contender, but for the rate."""
    with playing(comm, names, modules) as ranks:
        return [time for m in models for time in measure_steps(ranks, m, names, rounds)]


def measure_steps(
    ranks: Ranks, model: str, names: Sequence[str], rounds: int
) -> list[dict[str, Any]]:
    """Measure contenders in turn; return as `measure` does. Collective.

    Raises:
        UserError: a contender does not learn, or its ranks have different models.
    """
    turns = [[_once(ranks, model, name) for name in names] for _ in range(rounds)]
    firsts = [first for _, first in turns[0]]
    if max(firsts) > min(firsts) * (1 + SAME_LOSS):
        raise UserError(f"all must begin with the same loss of the {model} model: {firsts}")
    times = []
    for name, of_rounds in zip(names, zip(*turns, strict=True), strict=True):
        seconds = [of_round for of_round, _ in of_rounds]
        median = statistics.median(seconds)
        times.append({"model": model, "contender": name, "seconds": median, "rounds": seconds})
    return times


def _once(ranks: Ranks, model: str, name: str) -> tuple[float, float]:
    """Return the seconds of a step, and the loss of the first one."""
    period = max(1, CONTENDERS[name].period)
    with ranks.training(name, model, LR) as turn:
        _, (first, *_) = turn.steps(_whole(WARM_UP, period))
        estimate, _ = turn.steps(period)
        count = steps_for(estimate / period, period)
        seconds, (*_, last) = turn.steps(count)
        if not last < first:
            raise UserError(f"{name} does not learn: loss {first:.4f}, then {last:.4f}")
        if CONTENDERS[name].meets and not turn.same_model():
            raise UserError(f"{name}: all ranks must have the same model after {count} steps")
    return seconds / count, first


def steps_for(estimate: float, period: int) -> int:
    """Return the number of steps to measure, in whole periods, from the seconds of a step."""
    wanted = max(LEAST_STEPS, LEAST_S / estimate)
    return _whole(max(FEWEST_STEPS, min(wanted, MOST_S / estimate)), period)


def _whole(steps: float, period: int) -> int:
    return math.ceil(steps / period) * period
