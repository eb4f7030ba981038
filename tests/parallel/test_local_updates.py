"""Model averaging, block momentum, SlowMo and DiLoCo, on ranks whose data differ."""

from __future__ import annotations

import re
import tracemalloc
from functools import partial

import local_updates
import numpy as np
import pytest
from cases import BLOCK_SIZE, gradient_of, zeros
from local_updates import ALGORITHMS, equals_the_equations

from parallel_sgd import (
    SGD,
    Adam,
    BlockMomentumSGD,
    DiLoCo,
    Learner,
    ModelAveragingSGD,
    MomentumSGD,
    Parameters,
    UserError,
)
from parallel_sgd.algorithms import Block, SlowMomentum
from parallel_sgd.data import RankSource, Source
from parallel_sgd.errors import SharedError
from parallel_sgd.models import MLP
from parallel_sgd.state import wait_for

IDENTITIES = [
    local_updates.averaging_is_block_momentum_of_none,
    local_updates.averaging_every_step_is_data_parallel,
    local_updates.block_momentum_every_step_is_momentum,
    local_updates.cntk_is_classical_with_a_larger_rate,
    local_updates.slow_momentum_is_classical_at_a_constant_rate,
    local_updates.slow_momentum_divides_by_the_rate_of_a_mean,
    local_updates.diloco_is_nesterov_block_momentum,
    local_updates.fragments_every_step_are_data_parallel,
    local_updates.desynced_in_step_is_averaging,
    local_updates.sparse_is_diloco_without_momentum,
]


@pytest.mark.parametrize("identity", IDENTITIES, ids=lambda identity: identity.__name__)
def test_identity(on_ranks, identity):
    on_ranks(identity)


@pytest.mark.parametrize(("lr", "remembers"), [(2e-30, True), (5e-31, False)])
def test_slow_momentum_of_a_rate_near_0(lr, remembers):
    """Below 1e-30 a pseudo-gradient may be too large for the momentum, in units of the rate."""
    phi, u, g = (np.full(2, value, np.float32) for value in (0.0, 1.0, 4e-30))
    SlowMomentum(slow_momentum=0.5).step(phi, u, g, Block(1, 1, lr, 1))
    assert u == pytest.approx(0.5 + 2.0 * remembers)
    assert phi == pytest.approx(-5e-30 if remembers else -4e-30, abs=0)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        pytest.param(name, told, id=f"{name}, {'told' if told else 'asking'}")
        for name, (algorithm, _) in ALGORITHMS.items()
        for told in ((True,) if algorithm.has_quorum else (True, False))
    ],
)
def test_the_trajectory_is_that_of_the_equations(on_ranks, name, told):
    on_ranks(partial(equals_the_equations, name=name, told=told))


class Silent:
    """A communicator that may not be used: for the steps within a block."""

    def __init__(self, comm):
        self.rank, self.size, self.trace = comm.rank, comm.size, comm.trace


@pytest.mark.parametrize("source", [Source, RankSource])
def test_within_a_block_nothing_is_communicated(comm, source):
    """And a block's end costs one exchange in 32 bits."""
    parameters = Parameters({"w": np.zeros(9, np.float32)})
    learner = Learner(parameters, SGD(lr=0.1), ModelAveragingSGD(sync_steps=5), comm)
    x, y = np.eye(9, dtype=np.float32)[np.arange(200) % 9], np.arange(200)
    minibatches = source(x, y, minibatch_size=4 * comm.size, epochs=10).minibatches(learner)
    for step, (x, _) in zip(range(10), minibatches, strict=False):
        vars(learner)["comm"] = comm if step % 5 == 4 else Silent(comm)
        learner.gradient.flat[:] = x.sum(axis=0)
        learner.step(samples=len(x))
        blocks = (step + 1) // 5
        assert learner.bytes_sent == blocks * (comm.size - 1) * 9 * 4


@pytest.mark.parametrize("overlap", [0, 10**6])
def test_a_local_step_allocates_nothing(on_ranks, overlap):
    """No copy of the model, of which a hundredth would already be noticed. Ranks step together, and
    what an exchange in the background allocates (a thread's messages are copies) is not counted."""

    def body(comm):
        n = 2**18
        parameters = Parameters({"w": np.zeros(n, np.float32)})
        algorithm = BlockMomentumSGD(sync_steps=4, overlap_samples=overlap)
        learner = Learner(parameters, MomentumSGD(lr=0.1), algorithm, comm)
        peaks = []
        for _ in range(12):
            learner.gradient.flat.fill(1)
            learner.announce(1, comm.size)
            wait_for(learner.states)
            comm.barrier()
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            learner.step(samples=1)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        learner.finish()
        return [peak for step, peak in enumerate(peaks) if step > 4 and step % 4 in (1, 2)]

    tracemalloc.start()
    try:
        results = on_ranks(body)
    finally:
        tracemalloc.stop()
    assert max(max(peaks) for peaks in results) < 4 * 2**18 / 100 * len(results)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (ModelAveragingSGD(block_samples=7), "block_samples=7 must be at least a minibatch of all"),
        (BlockMomentumSGD(sync_period=1), "sync_period=1 must be at least a rank's part of a mini"),
    ],
)
def test_a_block_smaller_than_a_minibatch_is_refused(comm, algorithm, message):
    learner = Learner(zeros("one block"), SGD(lr=0.1), algorithm, comm)
    with pytest.raises(SharedError, match=f"{message}.*{8 * comm.size} samples"):
        learner.step(samples=8)


@pytest.mark.parametrize("bits", [1, 32])
@pytest.mark.parametrize("overlap", [0, 10**6])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_model_that_is_not_finite_ends_the_block_of_all(comm, bits, overlap, value):
    """Φ, the momentum and the residuals stay clean."""
    algorithm = BlockMomentumSGD(
        sync_steps=3, gradient_bits=bits, block_size=BLOCK_SIZE, overlap_samples=overlap
    )
    learner = Learner(zeros("large and small"), SGD(lr=0.1), algorithm, comm)
    culprit = comm.size - 1
    for step in range(6):
        learner.gradient.flat[:] = gradient_of(comm.rank, step, learner.gradient.flat.size)
        if comm.rank == culprit and step == 4:
            learner.gradient.flat[3] = value
        if step < 5:
            learner.step(samples=2)
    with pytest.raises(UserError, match=rf"model's change .* not finite.*rank {culprit}\)$"):
        learner.step(samples=2)
    wait_for(learner.states)
    residuals = learner.state.exchange.residuals
    for array in (
        learner.state.start,
        learner.state.momentum,
        *([] if residuals is None else [residuals.worker_error, residuals.owner_error["0"]]),
    ):
        assert np.isfinite(array).all()


def test_a_wrong_total_is_noticed_at_the_end_of_the_block(comm):
    learner = Learner(zeros("one block"), SGD(lr=0.1), ModelAveragingSGD(sync_steps=2), comm)
    for total in (4 * comm.size, 4 * comm.size + 1):
        learner.announce(4, total)
        if total == 4 * comm.size:
            learner.step(samples=4)
    counts = ", ".join(["8"] * comm.size)
    message = rf"have trained on {8 * comm.size} samples in this block \(\[{counts}\] by rank"
    with pytest.raises(SharedError, match=message):
        learner.step(samples=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fragments": 5}, "fragments=5 must be at most 4, the number of parameters"),
        (
            {"fragments": 2, "inner_state": "zero"},
            "fragments=2 must be 1 if the state of Adam is zeroed",
        ),
    ],
)
def test_fragments_that_a_model_cannot_have(comm, options, message):
    model = MLP([6, 5, 4], seed=0)
    algorithm = DiLoCo(sync_steps=3, block_size=4, **options)
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        Learner(model.parameters, Adam(lr=0.1), algorithm, comm)


def test_fragments_are_exchanged_one_after_the_other(on_ranks):
    """In equal parts of a period, each with its part of the bytes."""

    def body(comm):
        parameters = Parameters({name: np.zeros(12_000, np.float32) for name in "abcd"})
        algorithm = ModelAveragingSGD(sync_steps=8, fragments=4, block_size=100)
        learner = Learner(parameters, SGD(lr=0.1), algorithm, comm)
        sent = [0]
        for _ in range(24):
            learner.gradient.flat.fill(1 + comm.rank)
            learner.announce(1, comm.size)
            learner.step(samples=1)
            sent.append(learner.bytes_sent)
        return np.diff(sent).tolist()

    results = on_ranks(body)
    part = 2 * (len(results) - 1) * 12_000 * 4 // len(results)
    for sent in results:
        assert sent == [part * (step % 2) for step in range(24)]
