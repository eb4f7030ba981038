"""The cost of a slow worker, in every mode.

A gradient is a sleep, so that workers do not compete for cores, and a small real computation;
worker 0 sleeps three times as long.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

import numpy as np

from parallel_sgd import SGD, Communicator, DataParallelASGD, Learner
from parallel_sgd.communication.mpi.init_timeout import kill_if_longer_than
from parallel_sgd.models import MLP

from .bare import quiet_barrier, rate

MODES = ("async", "bounded", "sync", "geo")
WORKERS = 3
COMPUTE_S = 0.02
SLOWER = 3
MINIBATCH = 16
WARM_UP = 8  #: steps: more than the staleness of "bounded"


def measure(comm: Communicator, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure on all ranks: three workers and a server.

    Returns:
        for every mode "alike" and "slow": steps a second of a worker after the first, with all
        workers as fast and with the first slow; "slowest": of the slow first worker; "staleness":
        mean over all pushes. Medians over the rounds.
    """
    measured: dict[str, dict[str, list[float]]] = {mode: defaultdict(list) for mode in MODES}
    limit = 60 + 5 * rounds * 2 * len(MODES) * (seconds + 1)
    with kill_if_longer_than(limit, comm.rank, "the benchmark of a slow worker"):
        for _ in range(rounds):
            for mode in MODES:
                for name, slower in (("alike", 1), ("slow", SLOWER)):
                    quiet_barrier()
                    worked = comm.allgather_object(_train(comm, mode, slower, seconds))
                    (first, _), *others = worked[:WORKERS]
                    measured[mode][name].append(statistics.mean(steps for steps, _ in others))
                    if name == "slow":
                        measured[mode]["slowest"].append(first)
                        pushes = [pushed for _, pushed in worked[:WORKERS]]
                        measured[mode]["staleness"].append(_mean_staleness(pushes))
    return {
        mode: {name: statistics.median(values) for name, values in lists.items()}
        for mode, lists in measured.items()
    }


def _train(
    comm: Communicator, mode: Any, slower: int, seconds: float
) -> tuple[float, tuple[float, int]]:
    """Return a rank's steps a second, mean staleness of its pushes, and number of pushes."""
    model = MLP([64, 128, 10], seed=0)
    algorithm = DataParallelASGD(servers=1, mode=mode, sync_steps=1)
    learner = Learner(model.parameters, SGD(lr=0.01), algorithm, comm)
    steps, staleness, pushes = 0.0, 0.0, 0
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
        client_statistics = learner.state.client.statistics
        staleness, pushes = client_statistics.mean_staleness, client_statistics.pushes
    learner.finish()
    return steps, (staleness, pushes)


def _mean_staleness(workers: list[tuple[float, int]]) -> float:
    return sum(s * n for s, n in workers) / sum(n for _, n in workers)
