"""The cost of training PyTorch's models: a rank's memory, and the learner's own part of a step."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from parallel_sgd import Communicator

from ..timing import in_turn
from .contenders import CONTENDERS, PLAIN
from .step_times import LR, WARM_UP
from .tasks import SEED, SMALL, TASKS
from .turns import playing

ALONE = ["no exchange", "PyTorch, no exchange", PLAIN]
MOST_S, MOST_STEPS = 60.0, 400


@dataclass(frozen=True)
class Memory:
    """
    Attributes:
        model, contender: of the measurement.
        before_bytes: before the model was made, but after training a small model by the same
            contender: Python, PyTorch, MPI, gloo, and the kernels.
        peak_bytes: the maximum during some steps. Both of the rank with the most.
    """

    model: str
    contender: str
    before_bytes: int
    peak_bytes: int

    @property
    def added_bytes(self) -> int:
        """Memory of the model, its training and its exchange."""
        return self.peak_bytes - self.before_bytes


def measure_memory(comm: Communicator, model: str, name: str) -> dict[str, Any]:
    """Return the fields of a `Memory`, in processes that have trained nothing yet."""
    count = max(2 * WARM_UP, CONTENDERS[name].period)
    with playing(comm, [name], modules=True) as ranks:
        with ranks.training(name, SMALL, LR) as turn:
            turn.steps(count)
        before = memory_bytes("VmRSS")
        with ranks.training(name, model, LR) as turn:
            turn.steps(count)
            peak = memory_bytes("VmHWM")
    most = map(max, zip(*comm.allgather_object((before, peak)), strict=True))
    return vars(Memory(model, name, *most))


def memory_bytes(name: str) -> int:
    """Return the memory of this process: "VmRSS" now, or "VmHWM" at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(size) << 10  # from KiB


@dataclass(frozen=True)
class OwnCost:
    """Steps of one process, in turn: by our learner without an exchange; by zero_grad, backward and
    the optimizer's step; and by these with DDP around the model, in a group of one process.

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


def measure_own(
    comm: Communicator, model: str, most_s: float = MOST_S, most_steps: int = MOST_STEPS
) -> dict[str, Any]:
    """Return the fields of an `OwnCost`, of about `most_s` seconds and at most `most_steps`."""
    x, y = (of_rank[0] for of_rank in TASKS[model].minibatches(0, 1, SEED))
    with playing(comm, ALONE, modules=True) as ranks:
        trainers = {name: ranks.trainer(name, model, LR) for name in ALONE}
        calls = {name: partial(trainer.step, x, y) for name, trainer in trainers.items()}
        estimate = sum(last for *_, last in in_turn(calls, WARM_UP, warm_up=0).values())
        count = max(1, min(most_steps, int(most_s / estimate)))
        seconds = in_turn(calls, count, warm_up=0)
        for trainer in trainers.values():
            trainer.finish()
    ours, plain, ddp = map(statistics.median, seconds.values())
    return vars(OwnCost(model, ours, plain, ddp, count))
