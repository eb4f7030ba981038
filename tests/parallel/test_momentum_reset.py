"""The warning about blocks that are too short for the local momentum that they reset."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

import parallel_sgd as psgd
from parallel_sgd import SGD, Adam, BlockMomentumSGD, CNTKBlockMomentumSGD, MomentumSGD

HIGH = MomentumSGD(lr=0.01, momentum=0.99)  #: a time constant of 99.5 steps
TIMED = MomentumSGD(lr=0.01, momentum_time_constant=80)  #: samples of a rank: 40 steps of 2 samples

STEPS = (
    "reset_sgd_momentum=True zeroes the local momentum of 0.99 after every block of 20 steps, but "
    "this momentum takes about 100 steps to build up: give reset_sgd_momentum=False, a smaller "
    "momentum, or sync_steps=100 or more"
)

#: Algorithm, optimizer, and a part of the warning (None: no warning), with 2 samples a rank.
CASES = {
    "steps": (BlockMomentumSGD(sync_steps=20), HIGH, f"BlockMomentumSGD: {STEPS}"),
    "CNTK's": (CNTKBlockMomentumSGD(sync_steps=20), HIGH, f"CNTKBlockMomentumSGD: {STEPS}"),
    "period of a rank": (BlockMomentumSGD(sync_period=198), HIGH, "of 99 steps"),
    "one step less": (BlockMomentumSGD(sync_steps=99), HIGH, "sync_steps=100"),
    "long enough": (BlockMomentumSGD(sync_steps=100), HIGH, None),
    "long enough in samples": (BlockMomentumSGD(sync_period=199), HIGH, None),
    "a time constant": (BlockMomentumSGD(sync_period=78), TIMED, "sync_period=80 or more"),
    "N = tau K": (BlockMomentumSGD(sync_period=80), TIMED, None),
    "averaging": (psgd.ModelAveragingSGD(sync_steps=2, inner_state="zero"), HIGH, "'keep'"),
    "kept": (BlockMomentumSGD(sync_steps=2, reset_sgd_momentum=False), HIGH, None),
    "no momentum": (BlockMomentumSGD(sync_steps=2), SGD(lr=0.01), None),
    "corrected": (BlockMomentumSGD(sync_steps=2), Adam(lr=0.01, beta1=0.99), None),
    "the usual momentum": (BlockMomentumSGD(sync_steps=2), MomentumSGD(lr=0.01), None),
    "defaults": (BlockMomentumSGD(), HIGH, None),
}


def _train(comm, algorithm, optimizer):
    parameters = psgd.Parameters({"w": np.zeros(3, np.float32)})
    with psgd.Learner(parameters, optimizer, algorithm, comm) as learner:
        for step in range(3):
            learner.gradient.flat[:] = comm.rank + step
            learner.step(2)
        learner.finish()
    return comm.size


def _texts(on_ranks, algorithm, optimizer):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(lambda comm: _train(comm, algorithm, optimizer))
    assert all(warning.filename == __file__ for warning in caught)
    texts = [str(warning.message) for warning in caught]
    return on_ranks(lambda comm: texts)[0]


@pytest.mark.parametrize("case", CASES)
def test_the_warning(on_ranks, case):
    algorithm, optimizer, part = CASES[case]
    texts = _texts(on_ranks, algorithm, optimizer)
    assert len(texts) == (part is not None), texts  # once, on one rank
    assert part is None or part in texts[0]


def test_samples_of_all_ranks(on_ranks):
    """A block of N samples on K ranks is long enough for a time constant of N / K."""
    ranks = on_ranks(lambda comm: comm.size)[0]
    (text,) = _texts(on_ranks, BlockMomentumSGD(block_samples=76 * ranks), TIMED)
    assert f"block_samples={80 * ranks} or more" in text
    assert _texts(on_ranks, BlockMomentumSGD(block_samples=80 * ranks), TIMED) == []


def test_a_filter_that_makes_it_an_error_ends_all_ranks(on_ranks):
    def body(comm):
        with pytest.raises(psgd.UserError, match=re.escape(STEPS)):
            _train(comm, BlockMomentumSGD(sync_steps=20), HIGH)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(body)


def test_momentum_of_pytorch(on_ranks):
    """The largest of all groups of all optimizers."""
    torch = pytest.importorskip("torch")

    def body(comm):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        groups = [{"params": [model.weight], "momentum": 0.99}, {"params": [model.bias]}]
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.5)
        algorithm = BlockMomentumSGD(sync_steps=20)
        with psgd.torch.Learner(model, optimizer, algorithm, comm, reduction="mean") as learner:
            model(torch.full((2, 2), 1.0 + comm.rank)).mean().backward()
            learner.step(samples=2)
            learner.finish()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(body)
    texts = [str(warning.message) for warning in caught]
    (text,) = on_ranks(lambda comm: texts)[0]
    assert STEPS in text
