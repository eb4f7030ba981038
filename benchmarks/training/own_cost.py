"""The cost of the learner, and of DDP, beside a plain loop of PyTorch: one process, one rank.

The same model is trained three times, a step at a time, in turn: by our learner, without an
exchange; by zero_grad, backward and the optimizer's step; and by these with DDP around the model,
in a group of one process. The rest is the cost of each: moving each gradient to its place in a
vector, or in a bucket, and work for each parameter; the learner also checks whether gradients are
finite.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from parallel_sgd import Communicator

from .contenders import PLAIN
from .tasks import SEED, TASKS
from .turns import playing

NAMES = ["no exchange", "PyTorch, no exchange", PLAIN]
MOST_S, MOST_STEPS, WARM_UP = 60.0, 400, 5
LR = 1e-4


@dataclass(frozen=True)
class OwnCost:
    """
    Attributes:
        model: by name.
        seconds, plain_seconds, ddp_seconds: of a step by the learner, by the loop and by DDP,
            medians.
        steps: of each.
    """

    model: str
    seconds: float
    plain_seconds: float
    ddp_seconds: float
    steps: int


def measure(
    comm: Communicator, model: str, most_s: float = MOST_S, most_steps: int = MOST_STEPS
) -> dict[str, object]:
    """Return the fields of an `OwnCost`, of about `most_s` seconds and at most `most_steps` steps
    each."""
    x, y = (of_rank[0] for of_rank in TASKS[model].minibatches(0, 1, SEED))
    with playing(comm, NAMES, modules=True) as ranks:
        trainers = [ranks.trainer(name, model, LR) for name in NAMES]
        seconds: list[list[float]] = [[] for _ in trainers]
        until = time.perf_counter() + most_s
        for t in range(WARM_UP + most_steps):
            for k in range(len(trainers)):
                turn = (t + k) % len(trainers)
                begin = time.perf_counter()
                trainers[turn].step(x, y)
                if t >= WARM_UP:
                    seconds[turn].append(time.perf_counter() - begin)
            if t >= WARM_UP and time.perf_counter() > until:
                break
        for trainer in trainers:
            trainer.finish()
    ours, plain, ddp = map(statistics.median, seconds)
    return vars(OwnCost(model, ours, plain, ddp, len(seconds[0])))
