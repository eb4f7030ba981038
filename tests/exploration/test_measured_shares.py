"""Measured shares on ranks of different speeds, in simulated time."""

from __future__ import annotations

import numpy as np
import pytest

import parallel_sgd as psgd
from parallel_sgd import runtime
from parallel_sgd.testing import Outcome, explore

SECONDS = [0.01, 0.03, 0.03]  #: of each rank, for a sample
STEPS, SIZE = 120, 60


@pytest.mark.parametrize(
    "algorithm",
    [
        psgd.DataParallelSGD(),
        psgd.ModelAveragingSGD(sync_steps=8),
        psgd.DiLoCo(sync_steps=8, fragments=2, block_size=1, overlap_samples=200),
    ],
    ids=["every step", "blocks", "fragments"],
)
def test_ranks_train_at_the_sum_of_their_speeds(algorithm):
    """To 0.95 of it, as soon as they have measured: the slow ranks do not hold up the fast one."""

    def program(comm):
        parameters = psgd.Parameters({"w": np.zeros(3), "v": np.zeros(2)})
        with psgd.Learner(parameters, psgd.SGD(lr=0.1), algorithm, comm) as learner:
            x, y = np.zeros((STEPS * SIZE, 1)), np.zeros(STEPS * SIZE)
            source = psgd.data.Source(x, y, minibatch_size=SIZE, shares="measured")
            began = runtime.monotonic()
            at = [began]
            for inputs, _ in source.minibatches(learner):
                runtime.sleep(SECONDS[comm.rank] * len(inputs))
                learner.step(samples=len(inputs))
                at.append(runtime.monotonic())
            learner.finish()
        return at[STEPS] - at[STEPS // 2]

    def check(outcome: Outcome) -> None:
        assert not outcome.error
        samples, speed = SIZE * STEPS // 2, sum(1 / seconds for seconds in SECONDS)
        for seconds in outcome.results:
            goodput = samples / seconds / speed
            assert 0.95 <= goodput <= 1.02, f"{goodput:.3f} of the sum of speeds"

    explore(program, check=check, ranks=len(SECONDS), schedules=3, faults=0)
