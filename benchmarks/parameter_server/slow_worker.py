"""The cost of a slow worker, in every mode.

A gradient is a sleep, so that workers do not compete for cores, and a small real computation;
worker 0 sleeps three times as long.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import numpy as np

from parallel_sgd import SGD, Communicator, DataParallelASGD, Learner
from parallel_sgd.models import MLP

from .bare import medians, rate

MODES = ("async", "bounded", "sync", "geo")
WORKERS = 3
COMPUTE_S = 0.02
SLOWER = 3
MINIBATCH = 16
WARM_UP = 8  #: steps: more than the staleness of "bounded"


def measure(comm: Communicator, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Measure on all ranks: three workers and a server.

    Returns:
        for every mode "alike" and "slow": steps a second of a worker after the first, with all
        workers as fast and with the first slow; "slowest": of the slow first worker. Of medians
        over the rounds.
    """
    speeds = {"alike": 1, "slow": SLOWER}
    cases = {
        f"{mode}, {name}": partial(_train, comm, mode, slower, seconds)
        for mode in MODES
        for name, slower in speeds.items()
    }
    found = medians(comm, cases, rounds)
    measured = {}
    for mode in MODES:
        (_, *alike), (slowest, *slow) = (found[f"{mode}, {name}"][:WORKERS] for name in speeds)
        means = {"alike": statistics.fmean(alike), "slow": statistics.fmean(slow)}
        measured[mode] = {**means, "slowest": slowest}
    return measured


def _train(comm: Communicator, mode: Any, slower: int, seconds: float) -> float:
    """Return a rank's steps a second."""
    model = MLP([64, 128, 10], seed=0)
    algorithm = DataParallelASGD(servers=1, mode=mode, sync_steps=1)
    learner = Learner(model.parameters, SGD(lr=0.01), algorithm, comm)
    steps = 0.0
    if not learner.serves:
        pause = COMPUTE_S * (slower if comm.rank == 0 else 1)
        random = np.random.default_rng(comm.rank)
        x = random.standard_normal((MINIBATCH, 64), np.float32)
        y = random.integers(10, size=MINIBATCH)

        def step() -> None:
            time.sleep(pause)
            model.gradient(x, y, out=learner.gradient)
            learner.step(samples=MINIBATCH)

        steps = rate(learner.comm, step, seconds, WARM_UP)
    learner.finish()
    return steps
