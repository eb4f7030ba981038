"""Seconds of training until a test loss is reached, on the next byte of Python's library."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parallel_sgd import UserError

from .conductor import Conductor
from .contenders import PERIOD, PLAIN, WARM, side
from .tasks import BYTES, STEPS

EVERY = 2 * PERIOD  #: steps between two looks at the test loss; the clock stands meanwhile
TARGET = 2.0  #: nats
SAME = 1e-4  #: of losses on both sides, relative
RATES = {
    "32 bit": 0.1,
    "4 bit": 0.1,
    "2 bit": 0.1,
    "1 bit": 0.05,
    WARM: 0.05,
    "block momentum": 0.05,
    PLAIN: 0.1,
    "DDP, fp16": 0.1,
    "DDP, PowerSGD rank 1": 0.1,
}
"""Learning rates, the better of 0.05, 0.1 and 0.2 for ours; PyTorch's are those of 32 bit."""


@dataclass(frozen=True)
class ToLoss:
    """
    Attributes:
        contender, rate, lr: which; the rate in bits/s.
        target: nats.
        seconds, steps: until the test loss was no more than the target; None: it never was.
        curve: (seconds, test loss) at every look.
    """

    contender: str
    rate: float
    lr: float
    target: float
    seconds: float | None
    steps: int
    curve: list[tuple[float, float]]


def train_to_loss(
    conductor: Conductor,
    rate: float,
    name: str,
    lr: float,
    target: float = TARGET,
    most_steps: int = STEPS,
) -> ToLoss:
    """Train one contender until it is there, or has taken so many steps."""
    who = side(name)
    conductor.all(who, "begin", contender=name, task=BYTES, lr=lr)
    seconds, steps, curve = 0.0, 0, []
    while steps < most_steps:
        answers = conductor.all(who, "steps", count=EVERY)
        seconds += max(answer["seconds"] for answer in answers)
        steps += EVERY
        loss = conductor.first(who, "evaluate")["loss"]
        curve.append((seconds, loss))
        if loss <= target:
            break
    conductor.all(who, "end")
    reached = bool(curve) and curve[-1][1] <= target
    return ToLoss(name, rate, lr, target, seconds if reached else None, steps, curve)


def require_same_step(conductor: Conductor) -> None:
    """See that both sides learn the same: losses before and after a step in full precision.

    Raises:
        UserError: they are not the same to rounding.
    """
    losses = []
    for name in ("32 bit", PLAIN):
        conductor.all(side(name), "begin", contender=name, task=BYTES, lr=RATES[PLAIN])
        losses.append(conductor.all(side(name), "steps", count=2)[0]["losses"])
        conductor.all(side(name), "end")
    ours, theirs = losses
    if not np.allclose(ours, theirs, rtol=SAME, atol=0):
        raise UserError(
            "both sides must have the same losses before and after a step in full precision: "
            f"ours {ours}, PyTorch's {theirs}"
        )
