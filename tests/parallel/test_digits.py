"""Real data: ranks learn to read digits, and hold one model while they do."""

from __future__ import annotations

import numpy as np
import pytest
from invariants import same_on_all_ranks

from parallel_sgd import SGD, Communicator, DataParallelSGD, Learner
from parallel_sgd.data import Source, digits
from parallel_sgd.models import MLP

pytest.importorskip("sklearn")


def train(comm, algorithm, seed=None):
    """Two passes over the digits; returns the model and the learner."""
    model = MLP([64, 32, 10], seed=comm.rank if seed is None else seed)
    learner = Learner(model.parameters, SGD(lr=0.3), algorithm, comm)
    training, _ = digits(seed=0)
    for x, y in Source(training, minibatch_size=32, epochs=2).minibatches(learner):
        model.gradient(x, y, out=learner.gradient)
        learner.step(samples=len(y))
        same_on_all_ranks(comm, model.parameters.flat)
    learner.finish()
    same_on_all_ranks(comm, model.parameters.flat)
    assert learner.samples == 2 * len(training)
    return model, learner


@pytest.mark.few_ranks
@pytest.mark.parametrize(
    "options",
    [{"gradient_bits": 1}, {"gradient_bits": 4}, {"gradient_bits": 1, "distributed_after": 300}],
    ids=str,
)
def test_few_bits_learn_like_serial(comm, options):
    _, test = digits(seed=0)
    model, learner = train(comm, DataParallelSGD(**options))
    serial, _ = train(Communicator.single(), DataParallelSGD(), seed=0)
    loss, accuracy = model.evaluate(test.x, test.y)
    serial_loss, _ = serial.evaluate(test.x, test.y)
    assert accuracy > 0.85
    assert abs(loss - serial_loss) < 0.1
    sent = sum(comm.allgather_object(learner.bytes_sent))
    full = 2 * (comm.size - 1) * model.parameters.flat.nbytes * 90
    # Heads and lengths are a fourth of the messages of so small a model.
    assert sent <= options["gradient_bits"] / 32 * 1.3 * full


def test_full_precision_is_serial_to_rounding(comm):
    model, _ = train(comm, DataParallelSGD())
    serial, _ = train(Communicator.single(), DataParallelSGD(), seed=0)
    np.testing.assert_allclose(model.parameters.flat, serial.parameters.flat, rtol=1e-3, atol=1e-4)
