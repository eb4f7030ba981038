"""Seconds of a run on a cluster with a node for each rank, by the planner's cost model."""

from __future__ import annotations

import time
from functools import cache

from parallel_sgd import Communicator, DataParallelSGD, simulate
from parallel_sgd.costs import KernelSpeeds, Link, measure_kernel_speeds
from parallel_sgd.data import Source
from parallel_sgd.planning import Job, candidate_of
from parallel_sgd.schedules import Linear

from .contenders import CONTENDERS
from .optimizers import OPTIMIZERS
from .tasks import TASKS
from .training import ArrayModel, Run

LATENCY_S = 1e-4
STEPS = 20  #: timed

_kernel_speeds = cache(measure_kernel_speeds)


def seconds_of(run: Run, bits_per_s: float) -> float:
    """Predict the seconds of a run on links of some speed, without tests of the model.

    A step without communication is timed here, at the first call for a task.
    """
    task, contender = TASKS[run.task], CONTENDERS[run.contender]
    job = _job(run, bits_per_s, _kernel_speeds(), step_s(run.task, run.optimizer))
    candidate = candidate_of(contender.algorithm(run.options, run.samples), job)
    assert candidate is not None, f"{run.contender} has no plan"
    return task.steps_on(run.ranks) * candidate.cost(job).total_s


def _job(run: Run, bits_per_s: float, speeds: KernelSpeeds, step_s: float) -> Job:
    task = TASKS[run.task]
    return Job(
        nodes=run.ranks,
        ranks_per_node=1,
        link=Link.ethernet(bits_per_s, LATENCY_S),
        parameters=task.values,
        step_s=step_s,
        minibatch=task.minibatch,
        optimizer_vectors=2,
        speeds=speeds,
    )


@cache
def step_s(name: str, optimizer: str) -> float:
    """Return the seconds of a rank alone for a step of a task, measured."""
    task, seconds = TASKS[name], []
    kind = ArrayModel
    if task.torch:
        from .torch_trained import TorchModel as kind  # type: ignore[assignment]

    def alone(comm: Communicator) -> None:
        rate, samples = Linear({0: 1e-3, 1: 1e-3}), STEPS * task.minibatch
        training, _ = task.data(0, samples)
        model = kind(lambda: task.model(0), OPTIMIZERS[optimizer], rate, DataParallelSGD(), comm)
        source = Source(training, minibatch_size=task.minibatch, dtype=None)
        for x, y in source.minibatches(model.learner):
            began = time.perf_counter()
            model.step(x, y)
            seconds.append(time.perf_counter() - began)
        model.learner.finish()

    simulate(1, alone)
    return sorted(seconds)[len(seconds) // 2]
