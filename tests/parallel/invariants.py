"""What must hold on any number of ranks, as functions that every rank calls.

The tests run them as they are; `test_mutations` runs them on a package with a fault, where they
must fail.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any

import numpy as np
from cases import BLOCK_SIZE, GATHERS, gradient_of, minibatch_of, zeros

from parallel_sgd import Communicator, DataParallelSGD, Learner, Optimizer
from parallel_sgd.compression import Codec
from parallel_sgd.exchange import Exchange, Residuals
from parallel_sgd.models import MLP

Array = np.ndarray
ROUNDING = 2.0**-24


def same_bits(a: Array, b: Array) -> bool:
    """As a function, since pytest would spend minutes on the difference of two long strings."""
    return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())


def same_on_all_ranks(comm: Communicator, *arrays: Array) -> None:
    """Every rank holds the same bits."""
    digest = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
    assert len(set(comm.allgather_object(digest))) == 1, "ranks differ"


def nothing_lost(
    comm: Communicator, inputs: Array, results: Array, residuals: Residuals, steps: int
) -> None:
    """Sum of results + residuals of all ranks == sum of all inputs, to rounding."""
    left = residuals_of_all(comm, residuals)
    largest = max(1.0, *(np.abs(a).max(initial=0) for a in (inputs, left)))
    bound = 8 * ROUNDING * steps * comm.size * largest
    assert np.abs(results + left - inputs).max(initial=0) <= bound


def residuals_of_all(comm: Communicator, residuals: Residuals) -> Array:
    """The sum of all ranks' residuals, as workers and as owners, of a vector with one bucket."""
    everywhere = comm.allgather_object([residuals.worker_error, residuals.owner_error["0"]])
    own = np.sum([error for error, _ in everywhere], axis=0, dtype=float)
    return own + np.concatenate([error for _, error in everywhere]).astype(float)


def sums_in_rank_order(comm: Communicator, layout: str, dtype: Any, **options: Any) -> None:
    """The full-precision sum has the bits of ((g_0 + g_1) + g_2) + ... on every rank."""
    parameters = zeros(layout, dtype)
    exchange = Exchange(parameters, comm, **options)
    for step in range(3):
        n = parameters.flat.size
        expected = gradient_of(0, step, n, dtype)
        for k in range(1, comm.size):
            expected += gradient_of(k, step, n, dtype)
        vector = gradient_of(comm.rank, step, n, dtype)
        exchange.sum(vector)
        assert same_bits(vector, expected), "not the sum in rank order"


def conserves_gradients(
    comm: Communicator,
    codec: Codec,
    layout: str,
    steps: int = 12,
    residual_decay: float = 1.0,
    **options: Any,
) -> None:
    """Over many steps nothing is lost but what the decay forgets, and what every step gives is
    bit-equal on all ranks:

        sum of results + residuals of all ranks + sum of (1 - decay) residuals == sum of all inputs
    """
    parameters = zeros(layout)
    n = parameters.flat.size
    exchange = Exchange(parameters, comm, codec, residual_decay=residual_decay, **options)
    residuals = exchange.residuals(parameters)
    inputs, results = np.zeros(n), np.zeros(n)
    for step in range(steps):
        vector = gradient_of(comm.rank, step, n)
        inputs -= (1 - residual_decay) * residuals_of_all(comm, residuals)
        exchange.sum(vector, residuals)
        same_on_all_ranks(comm, vector)
        inputs += sum(gradient_of(k, step, n).astype(float) for k in range(comm.size))
        results += vector
        nothing_lost(comm, inputs, results, residuals, step + 1)
    if codec.bits < 32 and layout == "matrix and bias":
        assert residuals.worker_error.any(), "a lossy codec that loses nothing"


def equals_two_stages_in_one_place(
    comm: Communicator, codec: Codec, layout: str, steps: int = 4, **options: Any
) -> None:
    """The exchange has the bits of its equations, calculated here for all ranks one by one."""
    parameters = zeros(layout)
    n, ranks = parameters.flat.size, range(comm.size)
    exchange = Exchange(parameters, comm, codec, **options)
    residuals = exchange.residuals(parameters)
    own, total = np.zeros((comm.size, n), np.float32), np.zeros(n, np.float32)
    blocks = codec.blocks(parameters)
    owners = np.ceil(np.arange(1, comm.size) * n / comm.size)
    cuts = [0, *np.searchsorted(blocks.starts, owners).tolist(), len(blocks)]
    for step in range(steps):
        sent = np.empty((comm.size, n), np.float32)
        payload = np.empty(blocks.bytes.stop, np.uint8)
        for k in ranks:
            codec.encode(blocks, gradient_of(k, step, n), own[k], payload)
            codec.decode(blocks, payload, sent[k], add=False)
        expected = sent[0].copy()
        for k in ranks[1:]:
            expected += sent[k]
        for begin, end in pairwise(cuts):
            stripe = blocks.part(begin, end)
            values, place = stripe.values, stripe.bytes
            codec.encode(stripe, expected[values], total[values], payload[place])
            codec.decode(stripe, payload[place], expected[values], add=False)

        vector = gradient_of(comm.rank, step, n)
        exchange.sum(vector, residuals)
        mine = blocks.part(cuts[comm.rank], cuts[comm.rank + 1]).values
        assert np.array_equal(vector, expected), "not the two-stage sum"
        assert np.array_equal(residuals.worker_error, own[comm.rank]), "not this rank's residual"
        assert np.array_equal(residuals.owner_error["0"], total[mine]), "not the owner's residual"


def keeps_residuals_when_bits_change(
    comm: Communicator, schedule: dict[int, float], block_size: int = BLOCK_SIZE, **options: Any
) -> None:
    """What few bits have lost enters later sums, and 32 bits at last give back all of it.

    The schedule must end in 32 bits within 10 steps of 5 samples a rank.
    """
    parameters = zeros("large and small")
    algorithm = DataParallelSGD(gradient_bits=schedule, block_size=block_size, **options)
    learner = Learner(parameters, GATHERS, algorithm, comm)
    n, inputs = parameters.flat.size, np.zeros(parameters.flat.size)
    residuals = learner.state.exchange.residuals
    assert residuals is not None
    lost = []
    for step in range(10):
        learner.gradient.flat[:] = gradient_of(comm.rank, step, n)
        learner.step(samples=5)
        inputs += sum(gradient_of(k, step, n).astype(float) for k in range(comm.size))
        nothing_lost(comm, inputs, -parameters.flat, residuals, step + 1)
        lost.append(bool(residuals.worker_error.any()))
    assert any(lost)
    assert not lost[-1]
    np.testing.assert_allclose(-parameters.flat, inputs, rtol=0, atol=1e-4)


def equals_serial(comm: Communicator, optimizer: Optimizer, steps: int = 8, **options: Any) -> None:
    """K ranks at 32 bits take the steps of one rank on the concatenated minibatch."""
    model, alone = (MLP([6, 5, 4], seed=comm.rank, dtype=np.float64) for _ in range(2))
    learner = Learner(model.parameters, optimizer, DataParallelSGD(**options), comm)
    alone.parameters.flat[:] = model.parameters.flat
    local_step, gradient = optimizer.bind(alone.parameters), alone.parameters.like()
    start = model.parameters.flat.copy()
    for step in range(steps):
        x, y = minibatch_of(comm.rank, step)
        model.gradient(x, y, out=learner.gradient)
        everybody = [minibatch_of(k, step) for k in range(comm.size)]
        samples = sum(len(y) for _, y in everybody)
        assert learner.step(samples=len(y)) == samples
        same_on_all_ranks(comm, model.parameters.flat)
        if samples:
            x, y = (np.concatenate(parts) for parts in zip(*everybody, strict=True))
            alone.gradient(x, y, out=gradient)
            local_step(gradient.flat, samples)
        np.testing.assert_allclose(
            model.parameters.flat, alone.parameters.flat, rtol=1e-9, atol=1e-11
        )
    assert np.abs(start - model.parameters.flat).max() > 0.01
