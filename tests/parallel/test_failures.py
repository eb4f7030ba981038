"""Warm starts, and problems of one rank that all must know of."""

from __future__ import annotations

import numpy as np
import pytest
from cases import OPTIMIZERS, gradient_of, zeros
from learners import everything, refuses_what_is_not_finite, starts_warm

from parallel_sgd import SGD, DataParallelSGD, Learner, UserError

pytestmark = pytest.mark.messages

every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
NOT_FINITE = [np.nan, np.inf, -np.inf]
every_large_value = pytest.mark.parametrize("value", [1e35, -1e35, 1.0001e30])


@every_optimizer
def test_a_warm_start_ends_in_one_model(on_ranks, optimizer):
    on_ranks(lambda comm: starts_warm(comm, optimizer))


@pytest.mark.parametrize("bits", [4, 32])
def test_a_warm_start_for_other_bits(on_ranks, bits):
    on_ranks(lambda comm: starts_warm(comm, OPTIMIZERS["Adam"], bits))


def test_a_warm_start_needs_the_same_minibatch_everywhere(comm):
    algorithm = DataParallelSGD(distributed_after=100)
    learner = Learner(zeros("one block"), SGD(lr=0.1), algorithm, comm)
    if comm.size == 1:
        assert learner.step(samples=3) == 3
        return
    before = everything(learner)
    for samples in (3 + comm.rank, 3 + (comm.rank == comm.size - 1), 3 * (comm.rank == 0)):
        with pytest.raises(UserError, match=r"samples of a minibatch.*differs: rank.* 0.*: 3"):
            learner.step(samples=samples)
        assert everything(learner) == before
    assert learner.step(samples=3) == 3


def test_what_is_left_out_in_a_warm_start_counts_once(comm):
    """And not once for each rank; the last one ends it."""
    parameters = zeros("one block")
    parameters.flat[:] = comm.rank
    learner = Learner(parameters, SGD(lr=0.1), DataParallelSGD(distributed_after=6), comm)
    learner.parameters.flat[:] += comm.rank  # which machines that round differently would have
    learner.gradient.flat[:] = np.inf
    for count in (1, 2):
        assert not learner.distributed
        assert learner.runner.skip(3, None) == 3
        assert learner.samples == 3 * count
    assert learner.distributed and not learner.parameters.flat.any()


def test_a_warm_start_sends_no_objects(comm, monkeypatch):
    """Of pickled objects there is none in a minibatch: only a few integers."""
    learner = Learner(zeros("one block"), SGD(lr=0.1), DataParallelSGD(distributed_after=100), comm)
    monkeypatch.setattr(comm, "allgather_object", None)
    for samples in (3, 0, 5):
        assert learner.step(samples=samples) == samples


@pytest.mark.parametrize("value", [*NOT_FINITE, None])
@pytest.mark.parametrize("bits", [0.25, 1, 2, 8, 16, 32, {0: 0.5, 10: 32}], ids=str)
def test_a_rank_that_cannot_go_on_ends_the_step_of_all(on_ranks, bits, value):
    on_ranks(lambda comm: refuses_what_is_not_finite(comm, bits, value))


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_gradient_that_is_not_finite_in_float64(on_ranks, value):
    on_ranks(lambda comm: refuses_what_is_not_finite(comm, 32, value, dtype=np.float64))


@pytest.mark.parametrize("value", [*NOT_FINITE, None])
def test_a_rank_that_cannot_go_on_in_a_warm_start(on_ranks, value):
    on_ranks(lambda comm: refuses_what_is_not_finite(comm, 1, value, warm_start=True))


@every_large_value
@pytest.mark.parametrize("bits", [0.25, 1, 2, 8, 16, {0: 0.5, 100: 32}], ids=str)
def test_a_gradient_too_large_for_few_bits(on_ranks, bits, value):
    on_ranks(lambda comm: refuses_what_is_not_finite(comm, bits, value))


@every_large_value
@pytest.mark.parametrize(
    "algorithm",
    [
        DataParallelSGD(),
        DataParallelSGD(gradient_bits={0: 32, 100: 1}),
        DataParallelSGD(gradient_bits=1, distributed_after=100),
    ],
    ids=["32", "changing", "warm start"],
)
def test_full_precision_takes_all_that_is_finite(comm, algorithm, value):
    learner = Learner(zeros("large and small"), SGD(lr=1e-25), algorithm, comm)
    learner.gradient.flat[5] = value
    learner.step(samples=1)
    trained = learner.parameters.flat[5]
    np.testing.assert_allclose(trained, np.float32(-1e-25 * value), rtol=1e-5)


def test_several_ranks_that_diverge_are_all_named(comm):
    learner = Learner(zeros("one block"), SGD(lr=0.1), DataParallelSGD(), comm)
    learner.gradient.flat[:] = np.nan
    with pytest.raises(UserError) as caught:
        learner.step(samples=1)
    ranks = "rank 0" if comm.size == 1 else "ranks " + ", ".join(map(str, range(comm.size)))
    assert str(caught.value).endswith(f"(on {ranks})")


@pytest.mark.parametrize("largest", [1e29, -9.9e29, 1e30])
@pytest.mark.parametrize("bits", [0.25, 1, "sign", 2, 8, 16, 32])
def test_large_gradients_that_are_finite_are_exchanged(comm, largest, bits):
    """1e30 in float32 is a little more than 1e30; float16 would end at 65504."""
    options = {16: {"half_format": "bfloat16"}, "sign": {"gradient_bits": 1, "code": "sign"}}
    algorithm = DataParallelSGD(**{"gradient_bits": bits, **options.get(bits, {})})
    learner = Learner(zeros("large and small"), SGD(lr=1e-20), algorithm, comm)
    for step in range(3):
        gradient = gradient_of(comm.rank, step, learner.gradient.flat.size)
        learner.gradient.flat[:] = gradient * (abs(largest) / 1e3)
        learner.gradient.flat[5] = largest
        learner.step(samples=1)
    assert np.isfinite(learner.parameters.flat).all()


@pytest.mark.parametrize("samples", [-1, 2**63, 2**200])
def test_samples_must_be_what_can_be_counted(comm, samples):
    """Of one rank alone, too."""
    learner = Learner(zeros("one block"), SGD(lr=0.1), DataParallelSGD(), comm)
    message = rf"^samples={samples} must be a whole number from 0 to \d+ \(on rank 0\)$"
    with pytest.raises(UserError, match=message):
        learner.step(samples=samples if comm.rank == 0 else 1)
    assert learner.step(samples=2**33) == comm.size * 2**33


def test_a_rank_without_samples_adds_nothing(comm):
    """Not even what the last exchange has left in its gradient; NumPy's integers are numbers."""
    learner = Learner(zeros("one block"), SGD(lr=1.0), DataParallelSGD(), comm)
    for _ in range(2):
        if comm.rank == 0:
            learner.gradient.flat[:] = 1
        assert learner.step(samples=np.int64(comm.rank == 0)) == 1
    assert (learner.parameters.flat == -2).all()
