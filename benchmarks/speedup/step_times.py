"""Seconds of steps, evaluations, starts and ends, of workers on emulated hosts.

Computing is a wait, since the hosts share this machine's cores; the algorithms' work is real. Time
is dilated: with more hosts than cores, waits are longer and links slower by as many times, and the
seconds are divided by this factor. So each host has a core's worth of time for its exchange, and
sees links of the chosen rate. (Gupta et al., "To Infinity and Beyond: Time-Warped Network
Emulation", NSDI 2006.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from parallel_sgd import Communicator, Learner
from parallel_sgd.kernels import cpu
from parallel_sgd.schedules import Linear

from ..convergence.optimizers import OPTIMIZERS
from ..on_ranks import ONE_THREAD, on_hosts, on_ranks
from ..timing import median_s, seconds_of
from .contenders import BATCH, CONTENDERS, PERIOD, data, model

LR = 1e-6  #: so small that noise as a gradient leaves the model as it is
WARM_UP = PERIOD  #: steps: memory is touched, and a block has ended
MODULE = "speedup.step_times"

AXPY_VALUES = 1 << 24


@dataclass(frozen=True)
class Alone:
    """Times of a single worker's thread on a core: medians.

    Attributes:
        gradient_s: of a minibatch.
        evaluation_s: of the test set.
        axpy_gb_per_s: bytes read and written by ``x -= a * y`` in place.
    """

    gradient_s: float
    evaluation_s: float
    axpy_gb_per_s: float


@dataclass(frozen=True)
class Timed:
    """Times of the slowest worker in each round, on the hosts' clocks.

    Attributes:
        contender, workers: of the measurement.
        hosts: of workers and servers.
        dilation: factor of the time here.
        steps: in each round.
        step_s: mean seconds of a step, in each round.
        evaluation_s, start_s, finish_s: of an evaluation on all workers; of making the learner; and
            of completing all work under way at the end.
    """

    contender: str
    workers: int
    hosts: int
    dilation: float
    steps: int
    step_s: list[float]
    evaluation_s: list[float]
    start_s: list[float]
    finish_s: list[float]


def measure_alone(_: Communicator) -> dict[str, float]:
    """Measure the fields of `Alone`."""
    net, (train, test) = model(), data(BATCH, seed=0)
    gradient, x = net.parameters.like(), np.zeros(AXPY_VALUES, np.float32)
    y = np.ones_like(x)
    axpy_s = median_s(lambda: cpu.sgd_step(x, y, 1e-6), 51)
    return {
        "gradient_s": median_s(lambda: net.gradient(*train.arrays(), out=gradient), 101),
        "evaluation_s": median_s(lambda: net.evaluate(*test.arrays()), 7),
        "axpy_gb_per_s": 12 * AXPY_VALUES / axpy_s / 1e9,
    }


def alone() -> Alone:
    """Measure a single worker in a process of its own."""
    return Alone(**on_ranks(1, f"{MODULE}:measure_alone", {}, environ=ONE_THREAD))


def time_all(
    names: Iterable[str], workers: int, rate: float, cost: Alone, cores: int, **effort: int
) -> list[Timed]:
    """Time contenders with a number of workers, on links of a rate in bits/s.

    Args:
        cores: of this machine.
        effort: `rounds`, and `steps` in each.
    """
    by_hosts: dict[int, list[str]] = {}
    for name in names:
        by_hosts.setdefault(workers + CONTENDERS[name].servers, []).append(name)
    timed = []
    for hosts, some in by_hosts.items():
        dilation = dilation_of(hosts, cores)
        asked = {
            "names": some,
            "gradient_s": cost.gradient_s * dilation,
            "evaluation_s": cost.evaluation_s * dilation,
            **effort,
        }
        measured = on_hosts(hosts, rate / dilation, MODULE, asked, environ=ONE_THREAD)
        for name in some:
            of = {
                field.name: [turn[field.name] / dilation for turn in measured[name]]
                for field in fields(Timed)[-4:]
            }
            timed.append(Timed(name, workers, hosts, dilation, effort["steps"], **of))
    order = list(CONTENDERS)
    return sorted(timed, key=lambda one: order.index(one.contender))


def dilation_of(hosts: int, cores: int) -> float:
    """Return the dilation of time that gives each host a core."""
    return max(1.0, hosts / cores)


def measure(
    comm: Communicator,
    names: list[str],
    rounds: int,
    steps: int,
    gradient_s: float,
    evaluation_s: float,
) -> dict[str, list[dict[str, float]]]:
    """Time all contenders in turn, several rounds, after a short round that does not count.

    Returns:
        By contender the seconds of every round, of the slowest worker.
    """
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for i in range(rounds + 1):
        for name in names:
            own = _turn(comm, name, steps if i else WARM_UP, gradient_s, evaluation_s)
            of_workers = [one for one in comm.allgather_object(own) if one is not None]
            slowest = {field: max(one[field] for one in of_workers) for field in of_workers[0]}
            if i > 0:
                turns[name].append(slowest)
    return turns


def _turn(
    comm: Communicator, name: str, steps: int, gradient_s: float, evaluation_s: float
) -> dict[str, float] | None:
    """Return a worker's seconds; None for a server."""
    contender = CONTENDERS[name]
    parameters = model().parameters
    noise = np.random.default_rng(comm.rank).standard_normal(parameters.flat.size, np.float32)
    optimizer = OPTIMIZERS[contender.optimizer].make(Linear({0: LR}))
    learners: list[Learner] = []
    comm.barrier()
    start_s = seconds_of(
        lambda: learners.append(Learner(parameters, optimizer, contender.algorithm, comm))
    )
    (learner,) = learners
    if learner.serves:
        learner.finish()
        learner.close()
        return None
    workers = learner.comm

    def step() -> None:
        until = time.perf_counter() + gradient_s
        learner.gradient.flat[...] = noise
        _wait(until)
        learner.announce(BATCH, BATCH * workers.size)
        learner.step(samples=BATCH)

    def evaluate() -> None:
        with learner.evaluation():
            _wait(time.perf_counter() + evaluation_s / workers.size)
            workers.sum_integers(np.zeros(3, np.int64))

    seconds_of(step, repeat=WARM_UP)
    workers.barrier()
    step_s = seconds_of(step, repeat=steps)
    workers.barrier()
    times = {"start_s": start_s, "step_s": step_s, "evaluation_s": seconds_of(evaluate)}
    times["finish_s"] = seconds_of(learner.finish)
    learner.close()
    return times


def _wait(until: float) -> None:
    while (left := until - time.perf_counter()) > 0:
        time.sleep(left)


def part_steps(samples: int, evaluations: int, workers: int) -> int:
    """Return a worker's minibatches between evaluations, in whole blocks: the timed part."""
    return math.ceil(samples / (evaluations * BATCH * workers) / PERIOD) * PERIOD
