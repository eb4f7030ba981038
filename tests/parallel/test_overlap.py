"""Exchanges beside the computation: the same bits with overlap, one minibatch later with double
buffering, and no rank is left waiting."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from cases import gradient_of, samples_of
from invariants import same_on_all_ranks
from limits import patience

from parallel_sgd import (
    SGD,
    Communicator,
    DataParallelSGD,
    Learner,
    MomentumSGD,
    Parameters,
    UserError,
)
from parallel_sgd.communication import without_launcher

pytestmark = pytest.mark.messages

SHAPES = {"W1": (30, 20), "b1": (20,), "W2": (20, 40), "b2": (40,), "W3": (40, 5), "b3": (5,)}
STEPS = 7

both_transports = pytest.mark.parametrize("transport", ["collective", "pipelined"])


def learner_of(comm: Communicator, **options: Any) -> Learner:
    random = np.random.default_rng(1)
    arrays = {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    options = {"block_size": 64, "bucket_values": 200, **options}
    return Learner(Parameters(arrays), MomentumSGD(lr=0.01), DataParallelSGD(**options), comm)


def gradient(learner: Learner, step: int) -> np.ndarray:
    return gradient_of(learner.comm.rank, step, learner.gradient.flat.size)


def minibatch(learner: Learner, step: int, *, tell: bool) -> None:
    """The gradient comes parameter by parameter, the last ones first."""
    samples, values = samples_of(learner.comm.rank, step), learner.gradient.like()
    values.flat[:] = gradient(learner, step)
    if samples:
        for name in reversed(learner.gradient.names):
            learner.gradient[name] = values[name]
            if tell:
                learner.ready(name)
    learner.step(samples)


@both_transports
@pytest.mark.parametrize("bits", [4, 8, 32, {0: 32, 20: 4}])
def test_overlap_changes_no_bit(comm, transport, bits):
    """Also where some ranks have no samples, and in step 4 none has."""
    plain = learner_of(comm, gradient_bits=bits, transport=transport)
    overlapped = learner_of(comm, gradient_bits=bits, transport=transport, overlap=True)
    assert len(overlapped.state.exchange.buckets) > 2
    for step in range(STEPS):
        minibatch(plain, step, tell=False)
        minibatch(overlapped, step, tell=True)
        assert np.array_equal(plain.parameters.flat, overlapped.parameters.flat)
    for learner in (plain, overlapped):
        learner.finish()
    assert np.array_equal(plain.parameters.flat, overlapped.parameters.flat)
    if bits == 4:
        theirs, ours = (learner.state.exchange.residuals for learner in (plain, overlapped))
        assert np.array_equal(theirs.worker_error, ours.worker_error) and ours.worker_error.any()
    assert plain.bytes_sent == overlapped.bytes_sent
    assert (plain.bytes_sent > 0) == (comm.size > 1)


@both_transports
def test_each_bucket_has_a_step_of_its_own(comm, transport):
    """With an entropy code: nothing is lost, and all ranks have the same sums."""
    learner = learner_of(comm, gradient_bits=1, transport=transport, overlap=True)
    residuals = learner.state.exchange.residuals
    for step in range(STEPS):
        minibatch(learner, step, tell=True)
    assert residuals.worker_error.any()
    assert len(learner.state.exchange.current._step_sizes[0]) > 2
    same_on_all_ranks(comm, learner.parameters.flat)


@pytest.mark.parametrize(("bits", "scale"), [(4, 1.0), (32, 1e31)])
def test_some_parameters_need_not_be_told_of(comm, bits, scale):
    """Also of values that are too large for few bits, in full precision."""
    plain = learner_of(comm, gradient_bits=bits)
    overlapped = learner_of(comm, gradient_bits=bits, overlap=True)
    for learner in (plain, overlapped):
        learner.gradient.flat[:] = gradient(learner, 0) * scale
    if comm.rank != 1:
        overlapped.ready("W2")
    if comm.rank == 0:
        overlapped.ready("b3")
    for learner in (plain, overlapped):
        learner.step(2)
    assert np.array_equal(plain.parameters.flat, overlapped.parameters.flat)


def test_exchanges_begin_before_the_step(comm):
    """Once all ranks have told of the last parameters, their sum comes without a `step`."""
    learner = learner_of(comm, overlap=True)
    learner.gradient.flat[:] = gradient(learner, 0)
    expected = sum(gradient_of(k, 0, learner.gradient.flat.size) for k in range(comm.size))
    last = learner.state.exchange.buckets[0]
    for name in last.names:
        learner.ready(name)
    for _ in range(2000):
        if np.allclose(learner.gradient.flat[last.values], expected[last.values], atol=1e-4):
            break
        comm.messages().idle(1e-3)
    else:
        raise AssertionError("the last bucket has not been summed")
    learner.step(1)


@both_transports
def test_a_gradient_that_is_not_finite(comm, transport):
    """All ranks raise, whatever was under way; models are unchanged, residuals finite."""
    learner = learner_of(comm, gradient_bits=1, overlap=True, transport=transport)
    minibatch(learner, 0, tell=True)
    before = learner.parameters.flat.copy()
    learner.gradient.flat[:] = gradient(learner, 1)
    if comm.rank == comm.size - 1:
        learner.gradient["W2"][3, 3] = np.nan
    for name in reversed(learner.gradient.names):
        learner.ready(name)
    with pytest.raises(UserError, match=rf"not finite.*on rank {comm.size - 1}"):
        learner.step(1)
    assert np.array_equal(learner.parameters.flat, before)
    assert np.isfinite(learner.state.exchange.residuals.worker_error).all()
    minibatch(learner, 2, tell=True)  # and training can go on


@pytest.mark.parametrize("how", ["fail", "samples", "meet"])
def test_a_rank_that_fails_leaves_nobody_waiting(comm, how):
    """Others have begun to exchange what this rank will never compute."""
    learner = learner_of(comm, gradient_bits=1, overlap=True)
    learner.gradient.flat[:] = gradient(learner, 0)
    failing = comm.rank == 0
    if not failing or how == "samples":
        for name in ("b3", "W3", "b2"):
            learner.ready(name)
    if failing:
        end = (lambda: learner.step(0)) if how == "samples" else lambda: learner.fail("bad")
    else:
        end = learner.meet if how == "meet" else lambda: learner.step(2)
    with pytest.raises(UserError, match="rank 0"):
        end()
    assert not learner.state.exchange.overlapped.running
    minibatch(learner, 2, tell=True)


@both_transports
def test_in_a_warm_start_nothing_is_exchanged(comm, transport):
    """Reports of gradients have no effect, up to the last minibatch of the warm start."""
    plain, overlapped = (
        learner_of(comm, gradient_bits=8, transport=transport, distributed_after=6, **options)
        for options in ({}, {"overlap": True})
    )
    for step in range(5):
        for learner in (plain, overlapped):
            rank = comm.rank if learner.distributed else 0
            learner.gradient.flat[:] = gradient_of(rank, step, learner.gradient.flat.size)
            for name in reversed(learner.gradient.names):
                learner.ready(name)
        assert overlapped.state.exchange.overlapped.running == (step > 1) == learner.distributed
        for learner in (plain, overlapped):
            learner.step(samples=3)
        assert np.array_equal(plain.parameters.flat, overlapped.parameters.flat)
        assert plain.bytes_sent == overlapped.bytes_sent
        assert (plain.bytes_sent > 0) == (step > 1 and comm.size > 1)


def test_names_are_checked(comm):
    learner = learner_of(comm, overlap=True)
    with pytest.raises(UserError, match=r"name='W9' must be a parameter: W1, b1"):
        learner.ready("W9")


@both_transports
@pytest.mark.parametrize("bits", [1, 32, {0: 32, 14: 4}])
def test_double_buffering_is_one_minibatch_late(comm, transport, bits):
    """Every gradient is applied once, with the model that was there one minibatch later, and with
    the bits of its own minibatch."""
    options = {"gradient_bits": bits, "transport": transport}
    plain, late = (
        learner_of(comm, **options),
        learner_of(comm, double_buffering=True, **options),
    )
    models = [plain.parameters.flat.copy()]
    for step in range(STEPS):
        minibatch(plain, step, tell=False)
        minibatch(late, step, tell=False)
        assert late.samples == plain.samples
        if plain.last_samples:
            assert np.array_equal(late.parameters.flat, models[-1])
            models.append(plain.parameters.flat.copy())
    late.finish()
    assert np.array_equal(late.parameters.flat, plain.parameters.flat)
    assert late.samples == plain.samples
    assert late.state.sent_samples == 0


def test_a_model_tells_of_its_parameters(comm):
    """Last ones first, once each, when their gradient is complete."""
    import parallel_sgd as psgd

    model = psgd.models.MLP([6, 8, 8, 3], seed=1)
    x, y = np.random.default_rng(comm.rank).standard_normal((5, 6)), np.arange(5) % 3
    whole = model.parameters.like()
    model.gradient(x, y, out=whole)
    learner = Learner(model.parameters, SGD(lr=0.1), DataParallelSGD(overlap=True), comm)
    told = []

    def ready(name: str) -> None:
        assert np.array_equal(learner.gradient[name], whole[name])
        told.append(name)

    model.gradient(x, y, out=learner.gradient, ready=ready)
    assert sorted(told) == sorted(model.parameters)
    assert [name[1] for name in told] == ["3", "3", "2", "2", "1", "1"]
    model.gradient(x[:0], y[:0], out=learner.gradient, ready=ready)
    assert len(told) == 6


def test_what_no_step_has_taken_ends_with_training(comm):
    """A loop that is left between `ready` and `step`, on some of the ranks."""
    learner = learner_of(comm, gradient_bits=1, overlap=True)
    minibatch(learner, 0, tell=True)
    before = learner.parameters.flat.copy()
    learner.gradient.flat[:] = gradient(learner, 1)
    if comm.rank < 2:
        learner.ready("b3")
    learner.finish()
    assert not learner.state.exchange.overlapped.running
    assert np.array_equal(learner.parameters.flat, before)


def test_an_error_before_the_step_ends_the_program():
    script = """
import numpy as np, parallel_sgd as psgd
model = psgd.models.MLP([4, 3, 2])
learner = psgd.Learner(
    model.parameters, psgd.SGD(lr=0.1), psgd.DataParallelSGD(overlap=True),
    psgd.Communicator.single(),
)
learner.ready("b2")
raise KeyError("of the user's")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=without_launcher(os.environ),
        capture_output=True,
        text=True,
        timeout=60 * patience(),
    )
    assert done.returncode == 1
    assert "of the user's" in done.stderr


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bits", [{0: 32}, {0: 32, 10: 32}])
def test_a_schedule_of_32_bits_is_32_bits(comm, bits, dtype):
    models = []
    for gradient_bits in (bits, 32):
        parameters = Parameters({n: np.ones(s, dtype) for n, s in SHAPES.items()})
        algorithm = DataParallelSGD(gradient_bits=gradient_bits)
        learner = Learner(parameters, MomentumSGD(lr=0.01), algorithm, comm)
        for step in range(STEPS):
            minibatch(learner, step, tell=False)
        models.append(learner.parameters.flat)
    assert np.array_equal(*models)
