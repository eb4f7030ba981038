"""Ranks die while others leave out what is not finite: nobody waits, and all leave out the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_rollback import MINIBATCH, RANKS, TOTAL, N, after_a_kill, undisturbed

import parallel_sgd as psgd
from parallel_sgd.communication import Communicator

BAD = (4, 5, 15)  #: samples


def body(comm: Communicator) -> Any:
    x = np.random.default_rng(0).standard_normal((N, 30))
    x[list(BAD), 0] = 99
    parameters = psgd.Parameters({"W": np.zeros((5, 6))})
    source = psgd.data.Source(x, np.arange(N) % 2, minibatch_size=MINIBATCH, epochs=3)
    with psgd.Learner(
        parameters,
        psgd.MomentumSGD(lr=0.01),
        psgd.DataParallelSGD(),
        comm,
        commit_every=3,
        not_finite="skip",
    ) as learner:
        for inputs, _ in source.minibatches(learner):
            learner.gradient.flat[...] = (parameters.flat - inputs).sum(0)
            learner.step(len(inputs), np.nan if (inputs[:, 0] == 99).any() else 0.5)
        learner.finish()
        report = learner.report() or {}
        assert 0 < np.abs(parameters.flat).max() < 2, "bad samples were trained on"
        return parameters.flat.copy(), learner.samples, report["recovery"], comm.size


@pytest.mark.parametrize("spares", [0, 1])
def test_it_is_as_if_nobody_had_died(spares: int) -> None:
    expected, kills = undisturbed(body), 0
    for number in range(3, 200, 17):
        left = after_a_kill(body, number % RANKS, number, spares)
        if left is None:
            break
        kills += 1
        assert left[0][1] == TOTAL
        assert np.allclose(left[0][0], expected, rtol=1e-12, atol=1e-13)
    assert kills > 3
