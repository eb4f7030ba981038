"""DataParallelSGD: the identities of docs/algorithms.md, and what few bits and many ranks keep."""

from __future__ import annotations

import numpy as np
import pytest
from cases import BLOCK_SIZE, GATHERS, OPTIMIZERS, gradient_of, zeros
from invariants import (
    averages_over_samples,
    equals_serial,
    identical_data_change_nothing,
    keeps_residuals_when_bits_change,
    nothing_lost,
    same_bits,
    same_on_all_ranks,
)
from learners import everything, goes_on_as_if_never_stopped

from parallel_sgd import Communicator, DataParallelSGD, Learner, MomentumSGD, UserError

every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_bits = pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])


@every_optimizer
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_rank_is_serial(on_ranks, optimizer, dtype):
    """At 32 bits, bit for bit."""

    def body(comm):
        one = comm if comm.size == 1 else Communicator.single()
        parameters, alone = (zeros("large and small", dtype) for _ in range(2))
        learner = Learner(parameters, optimizer, DataParallelSGD(), one)
        local_step = optimizer.bind(alone)
        n = alone.flat.size
        for step in range(5):
            learner.gradient.flat[:] = gradient_of(comm.rank, step, n, dtype)
            learner.step(samples=step + 1)
            local_step(gradient_of(comm.rank, step, n, dtype), step + 1)
            assert same_bits(parameters.flat, alone.flat)
        assert learner.bytes_sent == 0

    on_ranks(body)


@every_optimizer
def test_ranks_are_serial_on_the_concatenated_minibatch(on_ranks, optimizer):
    on_ranks(lambda comm: equals_serial(comm, optimizer))


@pytest.mark.parametrize("bits", [1, 32])  # the levels of others do not scale with three ranks
def test_identical_data_are_one_rank(on_ranks, bits):
    on_ranks(lambda comm: identical_data_change_nothing(comm, bits))


VARIANTS = {
    "32 bits": DataParallelSGD(),
    "16 bits": DataParallelSGD(gradient_bits=16, half_format="bfloat16"),
    **{f"{b} bits": DataParallelSGD(gradient_bits=b, block_size=BLOCK_SIZE) for b in (1, 2, 4, 8)},
    "bits that change": DataParallelSGD(gradient_bits={0: 1, 20: 32, 30: 4}, block_size=100),
    "warm start": DataParallelSGD(gradient_bits=1, distributed_after=8, block_size=BLOCK_SIZE),
}


@pytest.mark.parametrize("algorithm", VARIANTS.values(), ids=VARIANTS)
def test_a_learner_goes_on_as_if_never_stopped(on_ranks, algorithm):
    on_ranks(lambda comm: goes_on_as_if_never_stopped(comm, algorithm, OPTIMIZERS["momentum"]))


@every_optimizer
def test_a_learner_goes_on_with_every_optimizer(on_ranks, optimizer):
    algorithm = VARIANTS["1 bits"]
    on_ranks(lambda comm: goes_on_as_if_never_stopped(comm, algorithm, optimizer))


def test_the_mean_is_over_samples(on_ranks):
    on_ranks(averages_over_samples)


@every_bits
def test_steps_without_any_samples_change_nothing(on_ranks, bits):
    """Ranks that have run dry go on answering; what a residual holds is not sent for nothing."""

    def body(comm):
        algorithm = DataParallelSGD(gradient_bits=bits, block_size=BLOCK_SIZE)
        learner = Learner(zeros("large and small"), OPTIMIZERS["Adam"], algorithm, comm)
        learner.gradient.flat[:] = gradient_of(comm.rank, 0, learner.gradient.flat.size)
        learner.step(samples=1)
        before = everything(learner)
        learner.gradient.flat[:] = 0
        assert learner.step(samples=0) == 0
        assert learner.last_samples == 0
        assert everything(learner) == before
        learner.finish()
        assert everything(learner) == before

    on_ranks(body)


@pytest.mark.parametrize(
    ("bits", "threshold"), [(1, "mean"), *((bits, "zero") for bits in (1, 2, 4, 8, 16, 32))]
)
def test_gradients_are_conserved(on_ranks, bits, threshold):
    """What the optimizer gets, and the residuals, are all that the ranks have given."""

    def body(comm):
        parameters = zeros("matrix and bias")
        algorithm = DataParallelSGD(gradient_bits=bits, threshold=threshold)
        learner = Learner(parameters, GATHERS, algorithm, comm)
        n, inputs = parameters.flat.size, np.zeros(parameters.flat.size)
        for step in range(10):
            learner.gradient.flat[:] = gradient_of(comm.rank, step, n)
            assert learner.step(samples=comm.rank + 1) == sum(range(1, comm.size + 1))
            inputs += sum(gradient_of(k, step, n).astype(float) for k in range(comm.size))
        residuals = learner.state.exchange.residuals
        if bits == 32:
            assert residuals is None
            np.testing.assert_allclose(-parameters.flat, inputs, rtol=1e-5, atol=1e-5)
        else:
            nothing_lost(comm, inputs, -parameters.flat, residuals, 10)

    on_ranks(body)


@pytest.mark.parametrize(
    "schedule",
    [{0: 1, 20: 32}, {0: 1, 10: 2, 15: 4, 20: 8, 25: 16, 30: 32}, {0: 32, 5: 1, 40: 32}],
    ids=str,
)
@pytest.mark.parametrize("block_size", [64, 100, 1024])
def test_residuals_survive_a_change_of_bits(on_ranks, schedule, block_size):
    """Blocks of every size: the residuals of one number of bits must fit all others."""
    on_ranks(lambda comm: keeps_residuals_when_bits_change(comm, schedule, block_size))


def test_bits_change_by_the_samples_of_all_ranks():
    algorithm = DataParallelSGD(gradient_bits={0: 32, 100: 4, 1000: 1})
    expected = {0: 32, 99: 32, 100: 4, 999: 4, 1000: 1, 10**9: 1}
    assert {samples: algorithm.exchange.bits_after(samples) for samples in expected} == expected
    assert DataParallelSGD(gradient_bits=8).exchange.bits_after(10**9) == 8


@every_bits
@every_optimizer
def test_parameters_are_bit_equal_after_every_step(on_ranks, bits, optimizer):
    def body(comm):
        algorithm = DataParallelSGD(gradient_bits=bits, block_size=BLOCK_SIZE)
        learner = Learner(zeros("large and small"), optimizer, algorithm, comm)
        for step in range(3):
            learner.gradient.flat[:] = gradient_of(comm.rank, step, learner.gradient.flat.size)
            learner.step(samples=comm.rank + 1)
            buffers = learner.local_step.state.buffers.values()
            same_on_all_ranks(comm, learner.parameters.flat, *buffers)

    on_ranks(body)


def test_error_feedback_reaches_what_plain_quantization_misses(on_ranks):
    """A constant gradient, at 1 bit: the mean of what is applied tends to it, like 1/steps."""

    def body(comm):
        parameters = zeros("large and small")
        algorithm = DataParallelSGD(gradient_bits=1, block_size=BLOCK_SIZE)
        learner = Learner(parameters, GATHERS, algorithm, comm)
        n, steps = parameters.flat.size, 150
        exact, means = sum(gradient_of(k, 0, n) for k in range(comm.size)), []
        for step in range(1, steps + 1):
            learner.gradient.flat[:] = gradient_of(comm.rank, 0, n)
            learner.step(samples=1)
            means.append(-parameters.flat / step)
        assert np.abs(means[-1] - exact).mean() < 0.1 * np.abs(means[0] - exact).mean()

    on_ranks(body)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_bits": 3}, "gradient_bits=3 must be one of 1, 2, 4, 8, 16, 32"),
        ({"gradient_bits": 0}, "gradient_bits=0 must be one of 1, 2, 4, 8, 16, 32"),
        (
            {"gradient_bits": {0: 32, 10: 5}},
            r"gradient_bits\[10\]=5 must be one of 1, 2, 4, 8, 16, 32$",
        ),
        ({"gradient_bits": {10: 1}}, "gradient_bits={10: 1} must begin at 0 samples"),
        ({"gradient_bits": {}}, "gradient_bits={} must begin at 0 samples"),
        ({"gradient_bits": 1, "threshold": "max"}, "threshold='max' must be 'zero' or 'mean'"),
        ({"gradient_bits": 2, "block_size": 0}, "block_size=0 must be a whole number from 1 to"),
        ({"gradient_bits": 16, "half_format": "f8"}, "half_format='f8' must be 'float16' or"),
        ({"distributed_after": -1}, "distributed_after=-1 must be a whole number, at least 0"),
    ],
)
def test_options_that_are_not_possible(options, message):
    with pytest.raises(UserError, match=f"^{message}"):
        DataParallelSGD(**options)


@pytest.mark.parametrize("bits", [1, 16, {0: 32, 100: 1}])
def test_few_bits_are_for_float32(on_ranks, bits):
    def body(comm):
        parameters = zeros("large and small", np.float64)
        with pytest.raises(UserError, match=r"needs float32 parameters, but these are float64"):
            Learner(parameters, MomentumSGD(lr=0.1), DataParallelSGD(gradient_bits=bits), comm)

    on_ranks(body)
