"""What the learner adds to a plain loop of PyTorch's: one process, and no other rank.

The same model is trained twice, a step at a time, each as often before the other as after it: by
`torch_ours.TorchOurs` on a single rank, which exchanges nothing, and by zero_grad, backward and the
optimizer's step. What is left is the learner's own cost: moving each gradient to its place in one
vector, looking at whether it is finite, and what it does for each parameter.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

from parallel_sgd import Communicator, UserError

from .conductor import ENVIRONMENT
from .member import Trainer
from .tasks import SEED, TASKS

OURS, PLAIN_LOOP = "no exchange", "PyTorch, no exchange"
MOST_S, MOST_STEPS, WARM_UP = 20.0, 400, 5
LR = 1e-4


@dataclass(frozen=True)
class OwnCost:
    """
    Attributes:
        model: which.
        seconds, plain_seconds: of a step by the learner and by the loop, medians.
        steps: of each.
    """

    model: str
    seconds: float
    plain_seconds: float
    steps: int


def own_costs(models: Iterable[str]) -> list[OwnCost]:
    """Of each model, in a process of its own, with the threads of all ranks of the benchmark."""
    costs = []
    for model in models:
        command = [sys.executable, "-m", __name__, model]
        process = subprocess.run(
            command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, check=False
        )
        if process.returncode:
            raise UserError(f"the learner's own cost of {model} was not found; why is said above")
        costs.append(OwnCost(**json.loads(process.stdout)))
    return costs


def measure(model: str, most_s: float = MOST_S, most_steps: int = MOST_STEPS) -> OwnCost:
    """In this process, for about so many seconds and at most so many steps of each."""
    import torch

    from .peer import Peer
    from .torch_ours import TorchOurs

    torch.set_num_threads(1)
    both: tuple[Trainer, Trainer] = (
        TorchOurs(Communicator.single(), OURS, model, LR, SEED),
        Peer(PLAIN_LOOP, model, LR, SEED),
    )
    x, y = (of_rank[0] for of_rank in TASKS[model].minibatches(0, 1, SEED))
    seconds: tuple[list[float], list[float]] = ([], [])
    until = time.perf_counter() + most_s
    for t in range(WARM_UP + most_steps):
        turns = [*zip(both, seconds, strict=True)]
        for trainer, taken in turns if t % 2 else reversed(turns):
            begin = time.perf_counter()
            trainer.step(x, y)
            if t >= WARM_UP:
                taken.append(time.perf_counter() - begin)
        if t >= WARM_UP and time.perf_counter() > until:
            break
    ours, plain = map(statistics.median, seconds)
    return OwnCost(model, ours, plain, len(seconds[0]))


if __name__ == "__main__":
    print(json.dumps(vars(measure(sys.argv[1]))))
