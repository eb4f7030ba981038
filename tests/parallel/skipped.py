"""What must hold where numbers are not finite and left out: see `invariants`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import BLOCK_SIZE, GATHERS, gradient_of, zeros
from invariants import nothing_lost, same_bits, same_on_all_ranks

import parallel_sgd as psgd
from parallel_sgd import Communicator, Learner, Optimizer
from parallel_sgd.errors import DivergedError
from parallel_sgd.training import capture, flatten

ADAM, MOMENTUM = psgd.Adam(lr=0.01), psgd.MomentumSGD(lr=0.1)
LOSSY = {"gradient_bits": 1, "block_size": BLOCK_SIZE}

#: Algorithm, optimizer, and minibatches in what is left out together.
ALGORITHMS: dict[str, tuple[Any, Optimizer, int]] = {
    "1 bit": (psgd.DataParallelSGD(**LOSSY), ADAM, 1),
    "overlap": (psgd.DataParallelSGD(**LOSSY, overlap=True), MOMENTUM, 1),
    "double buffering": (psgd.DataParallelSGD(**LOSSY, double_buffering=True), MOMENTUM, 1),
    "warm start": (psgd.DataParallelSGD(**LOSSY, distributed_after=1000), ADAM, 1),
    "low rank": (psgd.PowerSGD(rank=2), MOMENTUM, 1),
    "blocks": (psgd.BlockMomentumSGD(sync_steps=2, **LOSSY), MOMENTUM, 2),
    "blocks, keep": (psgd.ModelAveragingSGD(sync_steps=2, inner_state="keep"), ADAM, 2),
    "blocks, average": (psgd.SlowMo(sync_steps=2, inner_state="average"), ADAM, 2),
}
BLOCKS_WITH_OVERLAP = (psgd.DiLoCo(sync_steps=2, overlap_samples=1), MOMENTUM, 2)
CULPRITS = ("gradient", "loss")


def step(learner: Learner, number: int, *, bad: str = "") -> None:
    """A step on gradients of one's own; with `bad` numbers on the last rank."""
    rank, whole = learner.comm.rank, not learner.distributed
    g, loss = learner.gradient.flat, 0.5
    g[:] = gradient_of(0 if whole else rank, number, g.size)
    if rank == learner.comm.size - 1:
        if bad == "gradient":
            g[g.size // 2] = np.nan
        loss = np.inf if bad == "loss" else loss
    if learner.algorithm.overlap:
        for name in reversed([*learner.gradient]):
            learner.ready(name)
    learner.step(2 if whole else 2 + rank, loss)


def same_state(comm: Communicator, learner: Learner, twin: Learner) -> None:
    """All that a checkpoint would hold has the same bits in both."""
    (facts, arrays), (others, of_others) = (flatten(capture(each)) for each in (learner, twin))
    assert facts == others, "counters differ"
    wrong = [name for name, array in arrays.items() if not same_bits(array, of_others[name])]
    assert comm.allgather_object(wrong) == [[]] * comm.size, "left-out numbers have left a trace"


def leaves_no_trace(comm: Communicator, name: str, culprit: str) -> None:
    """What is left out is as if it had not been, but for the clock: all state, bit for bit."""
    algorithm, optimizer, together = ALGORITHMS[name]
    parameters = [zeros("large and small") for _ in range(2)]
    learner, twin = (
        Learner(x, optimizer, algorithm, comm, not_finite="skip" if x is parameters[0] else "stop")
        for x in parameters
    )
    for block in range(5):
        for number in range(together * block, together * (block + 1)):
            before = learner.samples
            step(learner, number, bad=culprit if block in (2, 4) and number % 2 == 0 else "")
            expected = 2 if not learner.distributed else sum(range(2, 2 + comm.size))
            assert learner.samples == before + expected, "the clock has not gone on"
            if block in (2, 4):
                twin.local_step.state.samples += learner.samples - before
            else:
                step(twin, number)
        same_state(comm, learner, twin)
    told = (learner.report() or {}).get("skipped", {})
    assert told.get("minibatches") == 2 * together, "what was left out is not counted"
    for each in (learner, twin):
        each.finish()
    same_on_all_ranks(comm, learner.parameters.flat)
    assert same_bits(learner.parameters.flat, twin.parameters.flat), "the final models differ"
    assert learner.parameters.flat.any()


def goes_back_to_the_common_model(comm: Communicator, culprit: str) -> None:
    """With overlap a block is mixed with the one before it: all ranks go on from the outer step of
    that, with the momentum that each had as the block began."""
    algorithm, optimizer, _ = BLOCKS_WITH_OVERLAP
    parameters = zeros("large and small")
    learner = Learner(parameters, optimizer, algorithm, comm, not_finite="skip")
    for number in range(10):
        if number == 4:
            momentum = learner.local_step.state.buffers["m"].copy()
        step(learner, number, bad=culprit if number == 4 else "")
        if number == 5:
            assert same_bits(learner.parameters.flat, learner.state.start), "not the common model"
            kept = learner.local_step.state.buffers["m"]
            assert same_bits(kept, momentum), "the momentum is not that of the beginning"
    learner.finish()
    same_on_all_ranks(comm, parameters.flat)
    assert np.isfinite(parameters.flat).all()


def what_is_left_out_is_not_owed(comm: Communicator, overlap: bool) -> None:
    """What was applied and the residuals add up to all gradients but those that are left out."""
    parameters = zeros("matrix and bias")
    algorithm = psgd.DataParallelSGD(**LOSSY, overlap=overlap)
    learner = Learner(parameters, GATHERS, algorithm, comm, not_finite="skip")
    inputs = np.zeros(parameters.flat.size)
    for number in range(9):
        bad = number in (3, 4, 7)
        step(learner, number, bad="gradient" * bad)
        for rank in range(0 if bad else comm.size):
            inputs += gradient_of(rank, number, inputs.size)
        residuals = learner.state.exchange.residuals
        nothing_lost(comm, inputs, -parameters.flat.astype(float), residuals, number + 1)
    learner.finish()


def ends_where_it_goes_on(comm: Communicator, name: str) -> None:
    """Too many in a row end training, with one error on all ranks; a good one begins a new row."""
    algorithm, optimizer, together = (ALGORITHMS | {"blocks, overlap": BLOCKS_WITH_OVERLAP})[name]
    learner = Learner(
        zeros("one block"), optimizer, algorithm, comm, not_finite="skip", most_skipped=2
    )

    def steps(bad: str) -> None:
        for number in range(together):
            step(learner, number, bad=bad)

    problem, taken = "", 0
    culprits = [*("gradient", "loss", "") * 3, "gradient", "loss", "gradient", "loss"]
    try:
        for bad in culprits:
            before = learner.parameters.flat.copy()
            steps(bad)
            taken += 1
    except DivergedError as error:
        problem = str(error)
    assert taken == 11, "training ends too early, or without end"
    assert problem.startswith(
        "numbers were not finite 3 times in a row, and at most most_skipped=2 "
    )
    assert problem.endswith(f"(on rank {comm.size - 1})")
    assert np.isfinite(learner.parameters.flat).all()
    if together == 1:
        assert same_bits(learner.parameters.flat, before)


def refuses_a_push(comm: Communicator, currency: str, mode: str) -> None:
    """A worker's push is left out: the others' go on, as if it had had no samples then."""
    algorithm = psgd.DataParallelASGD(servers=1, sync_steps=1, mode=mode, currency=currency)
    models = []
    for bad in (True, False):
        parameters = zeros("large and small", np.float64)
        with Learner(parameters, MOMENTUM, algorithm, comm, not_finite="skip") as learner:
            for number in range(0 if learner.serves else 6):
                last = learner.comm.rank == learner.comm.size - 1
                skipped = last and number in (2, 3)
                learner.gradient.flat[:] = gradient_of(comm.rank, number, parameters.flat.size)
                if bad and skipped:
                    learner.gradient.flat[5] = np.inf
                learner.step(0 if skipped and not bad else 3)
            learner.finish()
            workers = (learner.report() or {"workers": []})["workers"]
            counted = [worker["skipped"] for worker in workers]
            expected = [0] * (comm.size - 2) + [2 * bad]
            assert counted == ([] if learner.serves else expected), "pushes are not counted"
            models.append(parameters.flat.copy())
    assert same_bits(*models), "the push has changed something"
    same_on_all_ranks(comm, models[0])
    assert np.isfinite(models[0]).all() and models[0].any()


def names_who_differs(comm: Communicator, what: str, every: int) -> None:
    """One bit of one rank's memory, of the model or of a momentum, is found and named."""
    algorithm = psgd.BlockMomentumSGD(sync_steps=1) if what == "block" else psgd.DataParallelSGD()
    optimizer = psgd.MomentumSGD(lr=0.1)
    learner = Learner(zeros("one block"), optimizer, algorithm, comm, compare_every=every)
    odd = comm.size - 2 if comm.size > 1 else 0
    vectors = {
        "model": lambda: learner.parameters.flat,
        "momentum": lambda: learner.local_step.state.buffers["m"],
        "block": lambda: learner.state.momentum,
    }
    name = {"model": "model", "momentum": "m vector", "block": "outer momentum vector"}[what]
    for number in range(every):  # the last one compares, before it changes anything
        if number == every - 1 and comm.rank == odd:
            vectors[what]().view(np.uint32)[7] ^= 1 << 3
        if number == every - 1 and comm.size > 1:
            with pytest.raises(psgd.UserError) as caught:
                step(learner, number)
        else:
            step(learner, number)
    if comm.size == 1:
        return
    message = str(caught.value)
    assert message.startswith(f"the {name}'s checksum must be the same on all ranks, but differs")
    if comm.size == 2:
        assert message.endswith(
            "the wrong ranks are unknown: more than half of the 2 ranks must be equal"
        )
    else:
        assert f"; rank {odd} differs from the other ranks: " in message
