"""Seconds a step of every contender: in turn, several rounds, each from the beginning."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parallel_sgd import UserError

from .conductor import Conductor
from .contenders import CONTENDERS, side
from .tasks import TASKS

WARM_UP = 3  #: steps: memory is touched, DDP builds its buckets anew, PowerSGD has begun
LEAST_S, LEAST_STEPS = 2.0, 8  #: that are measured in a round …
MOST_S, FEWEST_STEPS = 20.0, 3  #: … unless that takes longer than this; then the fewest
LR = 0.001  #: at which all of them learn from the first steps on
SAME_LOSS = 1e-4  #: of the initial model on both sides, relative


@dataclass(frozen=True)
class StepTime:
    """
    Attributes:
        model, rate, contender: of the measurement; the rate in bits/s.
        seconds: of a step, the median of the rounds.
        rounds: seconds of a step in each round.
        steps: in each round.
        samples_per_s: of all ranks.
        losses: mean of all ranks in the first step, and in the last one, of the last round.
    """

    model: str
    rate: float
    contender: str
    seconds: float
    rounds: list[float]
    steps: int
    samples_per_s: float
    losses: tuple[float, float]


def measure_steps(
    conductor: Conductor, model: str, rate: float, names: Sequence[str], rounds: int
) -> list[StepTime]:
    """Measure contenders on running hosts.

    Raises:
        UserError: a contender does not learn, or its ranks have different models.
    """
    outcomes: dict[str, list[tuple[float, int, tuple[float, float]]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            outcomes[name].append(_once(conductor, model, name))
    firsts = {name: turns[-1][2][0] for name, turns in outcomes.items()}
    if max(firsts.values()) > min(firsts.values()) * (1 + SAME_LOSS):
        raise UserError(f"all must begin with the same loss of the {model} model: {firsts}")
    ranks = len(conductor.connections[side(names[0])])
    times = []
    for name, turns in outcomes.items():
        seconds = statistics.median(s for s, _, _ in turns)
        samples = ranks * TASKS[model].batch / seconds
        rounds_s = [s for s, _, _ in turns]
        steps, losses = turns[-1][1:]
        times.append(StepTime(model, rate, name, seconds, rounds_s, steps, samples, losses))
    return times


def _once(conductor: Conductor, model: str, name: str) -> tuple[float, int, tuple[float, float]]:
    """Return seconds of a step, number of steps, and the first and the last loss."""
    who, period = side(name), max(1, CONTENDERS[name].period)
    conductor.all(who, "begin", contender=name, task=model, lr=LR)
    warm = conductor.all(who, "steps", count=_whole(WARM_UP, period))
    estimate = _seconds(conductor.all(who, "steps", count=period)) / period
    count = steps_for(estimate, period)
    measured = conductor.all(who, "steps", count=count)
    first, last = (_mean(answers, i) for answers, i in ((warm, 0), (measured, -1)))
    if not last < first:
        raise UserError(f"{name} does not learn: loss {first:.4f}, then {last:.4f}")
    if CONTENDERS[name].period and len({answer["digest"] for answer in measured}) > 1:
        raise UserError(f"{name}: all ranks must have the same model after {count} steps")
    conductor.all(who, "end")
    return _seconds(measured) / count, count, (first, last)


def steps_for(estimate: float, period: int) -> int:
    """Return the number of steps to measure, in whole periods, from the seconds of a step."""
    wanted = max(LEAST_STEPS, LEAST_S / estimate)
    return _whole(max(FEWEST_STEPS, min(wanted, MOST_S / estimate)), period)


def _whole(steps: float, period: int) -> int:
    return math.ceil(steps / period) * period


def _seconds(answers: Sequence[dict[str, Any]]) -> float:
    """Return the seconds of the slowest rank."""
    return max(float(answer["seconds"]) for answer in answers)


def _mean(answers: Sequence[dict[str, Any]], step: int) -> float:
    return statistics.fmean(answer["losses"][step] for answer in answers)
