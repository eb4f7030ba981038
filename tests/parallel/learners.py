"""What must hold for learners that stop, fail, or start without exchange: see `invariants`."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from cases import BLOCK_SIZE, OPTIMIZERS, gradient_of, minibatch_of, zeros
from invariants import same_on_all_ranks

from parallel_sgd import Communicator, DataParallelSGD, Learner, Optimizer, UserError
from parallel_sgd.models import MLP

Array = np.ndarray


def everything(learner: Learner) -> dict[str, Any]:
    """A digest of every array that training has made on this rank, and its counters."""
    local, state = learner.local_step.state, learner.state
    arrays = {"parameters": learner.parameters.flat, **local.buffers}
    if residuals := state.exchange.residuals:
        arrays |= {"worker": residuals.worker_error, "owner": residuals.owner_error["0"]}
    digests = {name: hashlib.sha256(a.tobytes()).hexdigest() for name, a in arrays.items()}
    return {**digests, "counters": (local.steps, local.samples)}


def starts_warm(comm: Communicator, optimizer: Optimizer, bits: int = 1) -> None:
    """Before `distributed_after`, serial steps and no exchange; then all go on from rank 0's model.

    Ranks whose machines round differently are played by a perturbation.
    """
    model, alone = (MLP([6, 5, 4], seed=0) for _ in range(2))
    algorithm = DataParallelSGD(gradient_bits=bits, block_size=BLOCK_SIZE, distributed_after=20)
    learner = Learner(model.parameters, optimizer, algorithm, comm)
    local_step, gradient = optimizer.bind(alone.parameters), alone.parameters.like()
    whole = [minibatch_of(1, step) for step in (0, 3, 5, 8, 1, 6, 2)]  # 4, 0, 4, 0, 1, 1, 3, ...
    whole = [part for part in whole if len(part[1])] * 2
    perturbed = False
    for x, y in whole:
        if learner.samples + len(y) >= 20 and not perturbed:
            perturbed = True
            for array in (model.parameters.flat, *learner.local_step.state.buffers.values()):
                array *= 1 + 1e-6 * comm.rank
        if learner.samples >= 20:
            break
        assert not learner.distributed
        model.gradient(x, y, out=learner.gradient)
        assert learner.step(samples=len(y)) == len(y)
        assert learner.bytes_sent == 0
        alone.gradient(x, y, out=gradient)
        local_step(gradient.flat, len(y))
        np.testing.assert_allclose(model.parameters.flat, alone.parameters.flat, atol=1e-4)
        if comm.rank == 0:
            assert np.array_equal(model.parameters.flat, alone.parameters.flat)
    assert perturbed
    assert learner.distributed
    for step in range(3):
        same_on_all_ranks(comm, model.parameters.flat, *learner.local_step.state.buffers.values())
        x, y = minibatch_of(comm.rank, step)
        model.gradient(x, y, out=learner.gradient)
        learner.step(samples=len(y))
    same_on_all_ranks(comm, model.parameters.flat)
    assert (learner.bytes_sent > 0) == (comm.size > 1)


def refuses_what_is_not_finite(
    comm: Communicator,
    bits: Any,
    value: float | None,
    warm_start: bool = False,
    dtype: Any = np.float32,
) -> None:
    """One rank's bad value is an error on all that names it, and changes nothing on any.

    Args:
        value: None: the rank calls `fail` instead, where the others wait in `step`.
    """
    culprit = comm.size - 1
    algorithm = DataParallelSGD(
        gradient_bits=bits, block_size=BLOCK_SIZE, distributed_after=10**6 if warm_start else 0
    )
    learner, twin = (
        Learner(zeros("large and small", dtype), OPTIMIZERS["momentum"], algorithm, comm)
        for _ in range(2)
    )
    message = r"label 12"
    if value is not None:
        message = f"the gradient is not finite: its largest magnitude is {abs(value)}; a smaller.*"
        if np.isfinite(value):
            message = (
                r"the gradient is too large: its largest magnitude is [\d.]+e\+3[05], and at most "
                r"1e\+30 can be exchanged with gradient_bits=[\d.]+; .*"
            )
    n = learner.parameters.flat.size

    def step() -> None:
        if comm.rank == culprit and value is None:
            learner.fail("label 12")
        learner.step(samples=2)

    for number in range(4):
        if number == 2:
            learner.gradient.flat[:] = gradient_of(comm.rank, 9, n)
            if comm.rank == culprit and value is not None:
                learner.gradient.flat[n // 3] = value
            before = everything(learner)
            with pytest.raises(UserError, match=rf"^{message} \(on rank {culprit}\)$"):
                step()
            assert everything(learner) == before, "a refused gradient left a trace"
        for trained in (learner, twin):
            trained.gradient.flat[:] = gradient_of(0 if warm_start else comm.rank, number, n)
            trained.step(samples=2)
        assert everything(learner) == everything(twin)
    same_on_all_ranks(comm, learner.parameters.flat)
