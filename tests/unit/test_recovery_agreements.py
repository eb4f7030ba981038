"""A recovery measures no transport again, and compares nothing that all ranks have compared."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
from failures import Failure, FailurePlan

import parallel_sgd as psgd
from parallel_sgd.algorithms import exchange_choices
from parallel_sgd.communication import Communicator, simulate_recovery
from parallel_sgd.exchange import plan

RANKS, N, SAMPLES, MINIBATCH = 3, 1 << 17, 96, 12


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """Count trials and comparisons, by what they are and by the generation of ranks."""
    counts: Counter[tuple[str, int]] = Counter()

    def count(owner: Any, name: str, comm_of: Any) -> None:
        right = getattr(owner, name)

        def counting(*args: Any, **options: Any) -> Any:
            counts[name, comm_of(args).generation] += 1
            return right(*args, **options)

        monkeypatch.setattr(owner, name, counting)

    count(Communicator, "require_agreement", lambda args: args[0])
    count(plan, "try_transports", lambda args: args[0])
    count(exchange_choices, "choose_bits", lambda args: args[2])
    return counts


def train(comm: Communicator, session: bool, bits: Any) -> int:
    x = np.random.default_rng(7).standard_normal((SAMPLES, 8)).astype(np.float32)
    y = np.arange(SAMPLES) % 4
    model = psgd.models.MLP([8, N // 16, 4], seed=0)
    algorithm = psgd.DataParallelSGD(gradient_bits=bits)
    learner = psgd.Learner(model.parameters, psgd.SGD(lr=0.01), algorithm, comm, commit_every=1)
    if session:
        psgd.TrainingSession(
            learner=learner,
            objective=model,
            train=psgd.data.Arrays(x, y),
            minibatch_size=MINIBATCH,
            epochs=1,
        ).run()
    else:
        source = psgd.data.Source(x, y, MINIBATCH, epochs=1)
        for xs, ys in source.minibatches(learner):
            model.gradient(xs, ys, out=learner.gradient)
            learner.step(len(xs))
        learner.finish()
    return comm.size


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("bits", [4, "auto"])
def test_what_was_agreed_and_measured_is_carried_over(counted, session, bits):
    body = partial(train, session=session, bits=bits)
    with FailurePlan(Failure(1, step=3)) as plan:
        sizes = simulate_recovery(RANKS, body, timeout_s=100)
    assert plan.struck
    assert [size for size in sizes if size is not None] == [RANKS - 1] * (RANKS - 1)
    first = {name for (name, generation), count in counted.items() if generation == 0}
    assert {"require_agreement", "choose_bits" if bits == "auto" else "try_transports"} <= first
    assert not {key for key in counted if key[1] > 0}


@pytest.mark.parametrize("session", [False, True])
def test_ranks_that_join_are_compared_and_measure_nothing(counted, session):
    with FailurePlan(Failure(1, step=3)) as plan:
        sizes = simulate_recovery(
            RANKS, partial(train, session=session, bits="auto"), spares=1, timeout_s=100
        )
    assert plan.struck
    assert [size for size in sizes if size is not None] == [RANKS] * RANKS
    assert counted["require_agreement", 1] > 0
    assert not {name for name, generation in counted if generation > 0} - {"require_agreement"}
