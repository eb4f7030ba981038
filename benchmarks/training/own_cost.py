"""The cost of the learner, and of DDP, beside a plain loop of PyTorch: one process, one rank.

The same model is trained three times, a step at a time, in turn: by `torch_ours.TorchOurs` on a
single rank, without an exchange; by zero_grad, backward and the optimizer's step; and by these with
DDP around the model, in a group of one process. The rest is the cost of each: moving each gradient
to its place in a vector, or in a bucket, and work for each parameter; the learner also checks
whether gradients are finite.
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
from .contenders import PLAIN
from .member import Trainer
from .tasks import SEED, TASKS

OURS, PLAIN_LOOP = "no exchange", "PyTorch, no exchange"
MOST_S, MOST_STEPS, WARM_UP = 60.0, 400, 5
LR = 1e-4

#: PyTorch's threads let go of the last step within so long. They need Python's lock for that, and
#: DDP's end waits for them while it holds the lock: where it came sooner, the process would hang.
IDLE_S = 0.5


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


def own_costs(models: Iterable[str]) -> list[OwnCost]:
    """Measure each model in a new process, with the threads of the benchmark's ranks."""
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
    """Measure in this process, for about `most_s` seconds and at most `most_steps` steps each."""
    import torch
    import torch.distributed as dist

    from .peer import Peer
    from .torch_ours import TorchOurs

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainers: tuple[Trainer, ...] = (
        TorchOurs(Communicator.single(), OURS, model, LR, SEED),
        Peer(PLAIN_LOOP, model, LR, SEED),
        Peer(PLAIN, model, LR, SEED),
    )
    x, y = (of_rank[0] for of_rank in TASKS[model].minibatches(0, 1, SEED))
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
    dist.destroy_process_group()
    time.sleep(IDLE_S)
    ours, plain, ddp = map(statistics.median, seconds)
    return OwnCost(model, ours, plain, ddp, len(seconds[0]))


if __name__ == "__main__":
    print(json.dumps(vars(measure(sys.argv[1]))))
