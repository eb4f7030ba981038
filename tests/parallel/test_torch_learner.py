"""PyTorch's models by the learner: the ranks together train as one process."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_models import (
    MLP,
    MODELS,
    OPTIMIZERS,
    Branches,
    batch,
    counts_of,
    joined,
    learner_of,
    made,
    train,
    values,
)

import parallel_sgd as psgd
from parallel_sgd import UserError

pytestmark = [pytest.mark.threads(1, 3), pytest.mark.ranks(2)]

STEPS = 8


def train_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, ranks: int, **how: Any
) -> None:
    x, y = joined(model, step, counts_of(ranks, step))
    optimizer.zero_grad()
    F.cross_entropy(model(x), y, **how).backward()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("overlap", [False, True])
def test_as_one_process(comm, optimizer, reduction, overlap):
    """Uneven minibatches, some of them empty; whoever divides must not be off by the ranks."""
    alone, model = made(MLP), made(MLP, seed=comm.rank)
    own = OPTIMIZERS[optimizer](alone)
    algorithm = psgd.DataParallelSGD(overlap=overlap, bucket_values=50)
    learner = learner_of(model, comm, optimizer, algorithm, reduction=reduction)
    for step in range(STEPS):
        train_alone(alone, own, step, comm.size, reduction=reduction)
        own.step()
        train(learner, step, counts_of(comm.size, step)[comm.rank], reduction=reduction)
        assert np.abs(values(model) - values(alone)).max() < 1e-12
    learner.finish()


@pytest.mark.parametrize("name", ["attention", "lstm"])
def test_models_as_one_process(comm, name):
    alone, model = made(MODELS[name]), made(MODELS[name], seed=comm.rank)
    own = OPTIMIZERS["adamw"](alone)
    learner = learner_of(model, comm, "adamw")
    for step in range(STEPS):
        train_alone(alone, own, step, comm.size)
        own.step()
        train(learner, step, counts_of(comm.size, step)[comm.rank])
        assert np.abs(values(model) - values(alone)).max() < 1e-9


def test_optimizers_of_our_own(comm):
    """The same, with a learning rate for the mean; and clipped."""
    alone, model = made(MLP), made(MLP)
    own = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    learner = psgd.torch.Learner(
        model, psgd.MomentumSGD(lr=0.1), psgd.DataParallelSGD(), comm, clip_norm=0.3
    )
    for step in range(STEPS):
        train_alone(alone, own, step, comm.size)
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.3)
        own.step()
        train(learner, step, counts_of(comm.size, step)[comm.rank])
        assert learner.gradient_norm == pytest.approx(float(norm), rel=1e-9)
    assert np.abs(values(model) - values(alone)).max() < 1e-9


@pytest.mark.parametrize("overlap", [False, True])
def test_the_exchanged_gradient_is_clipped(comm, overlap):
    alone, model = made(MLP), made(MLP)
    own = OPTIMIZERS["momentum"](alone)
    learner = learner_of(
        model, comm, algorithm=psgd.DataParallelSGD(overlap=overlap), clip_norm=0.2
    )
    clipped = 0
    for step in range(STEPS):
        train_alone(alone, own, step, comm.size)
        clipped += float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.2)) > 0.2
        own.step()
        train(learner, step, counts_of(comm.size, step)[comm.rank])
    assert clipped
    assert np.abs(values(model) - values(alone)).max() < 1e-9


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_of_several_backwards_add_up(comm, overlap):
    alone, model = made(MLP), made(MLP)
    own = OPTIMIZERS["momentum"](alone)
    algorithm = psgd.DataParallelSGD(overlap=overlap, bucket_values=50)
    learner = learner_of(model, comm, algorithm=algorithm)
    for step in range(STEPS):
        own.zero_grad()
        for half in (2 * step, 2 * step + 1):
            x, y = joined(alone, half, [3] * comm.size)
            (F.cross_entropy(alone(x), y) / 2).backward()
        own.step()
        x, y = batch(model, comm.rank, 2 * step, 3)
        with learner.no_sync():
            (F.cross_entropy(model(x), y) / 2).backward()
        x, y = batch(model, comm.rank, 2 * step + 1, 3)
        (F.cross_entropy(model(x), y) / 2).backward()
        learner.step(samples=6)
    assert np.abs(values(model) - values(alone)).max() < 1e-9


@pytest.mark.parametrize("overlap", [False, True])
def test_a_parameter_that_only_the_first_backward_uses(comm, overlap):
    alone, model = made(Branches), made(Branches)
    own = OPTIMIZERS["momentum"](alone)
    learner = learner_of(model, comm, algorithm=psgd.DataParallelSGD(overlap=overlap))
    for step in range(STEPS):
        own.zero_grad()
        for which in (0, 1):
            alone.which = model.which = which
            x, y = joined(alone, 2 * step + which, [3] * comm.size)
            (F.cross_entropy(alone(x), y) / 2).backward()
            x, y = batch(model, comm.rank, 2 * step + which, 3)
            with learner.no_sync() if which == 0 else nullcontext():
                (F.cross_entropy(model(x), y) / 2).backward()
        own.step()
        learner.step(samples=6)
        assert np.abs(values(model) - values(alone)).max() < 1e-9


@pytest.mark.filterwarnings("ignore:the gradient of '0.weight' was changed")
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_lie_in_the_learners_vector(comm, overlap):
    """As soon as backward has them; and what the program puts in their place counts."""
    alone, model = made(MLP), made(MLP)
    own = OPTIMIZERS["momentum"](alone)
    learner = learner_of(model, comm, algorithm=psgd.DataParallelSGD(overlap=overlap))
    begin = learner.gradient.flat.ctypes.data
    for step in range(STEPS):
        own.zero_grad()
        x, y = joined(alone, step, [2] * comm.size)
        F.cross_entropy(alone(x), y).backward()
        x, y = batch(model, comm.rank, step, 2)
        with learner.no_sync():
            F.cross_entropy(model(x), y).backward()
        places = [p.grad.data_ptr() - begin for p in model.parameters()]
        sizes = [8 * p.numel() for p in model.parameters()]
        assert places == [sum(sizes[:i]) for i in range(len(sizes))]
        for p in (*alone.parameters(), *model.parameters()):
            p.grad = p.grad * 3
        own.step()
        learner.step(samples=2)
        assert all(p.grad is None for p in model.parameters())
        assert np.abs(values(model) - values(alone)).max() < 1e-9


def test_overlap_needs_to_be_told_of_the_last_backward(comm):
    learner = learner_of(made(MLP), comm, algorithm=psgd.DataParallelSGD(overlap=True))
    train(learner, 0, 2)
    x, y = batch(learner.model, comm.rank, 1, 2)
    F.cross_entropy(learner.model(x), y).backward()
    loss = F.cross_entropy(learner.model(x), y)
    with pytest.raises(UserError, match="no_sync"):
        loss.backward()
    with pytest.raises(UserError, match="given up"):
        learner.fail("given up")


def test_overlap_begins_in_backward(comm):
    """From the second step on, by the samples of the one before; a wrong guess costs a second
    exchange, and no accuracy (`test_as_one_process` has such)."""
    learner = learner_of(
        made(MLP), comm, algorithm=psgd.DataParallelSGD(overlap=True, bucket_values=50)
    )
    begun = []
    for step in range(3):
        x, y = batch(learner.model, comm.rank, step, 2)
        F.cross_entropy(learner.model(x), y).backward()
        begun.append(learner.state.exchange.overlapped.running)
        learner.step(samples=2)
    assert begun == [False, True, True]


def test_an_algorithm_may_leave_what_comes_late_to_full_precision(comm):
    """Minibatches are uneven: with overlap some guesses are wrong."""
    late = []

    class Late(psgd.DataParallelSGD):
        def sum_late(self, state, work, vector):
            late.append(float(np.abs(vector).max()))
            psgd.Algorithm.sum_late(self, state, work, vector)

    alone, model = made(MLP), made(MLP)
    own = OPTIMIZERS["momentum"](alone)
    learner = learner_of(model, comm, algorithm=Late(overlap=True, bucket_values=50))
    for step in range(STEPS):
        train_alone(alone, own, step, comm.size)
        own.step()
        train(learner, step, counts_of(comm.size, step)[comm.rank])
        assert np.abs(values(model) - values(alone)).max() < 1e-12
    assert any(late)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("overlap", [False, True])
def test_unused_parameters(comm, optimizer, overlap):
    """One that no rank uses is left alone: no momentum, no decay. Of two branches each rank uses
    one, in some steps all the same one."""
    alone, model = made(Branches), made(Branches)
    own = OPTIMIZERS[optimizer](alone)
    learner = learner_of(model, comm, optimizer, psgd.DataParallelSGD(overlap=overlap))
    never = model.never.weight.detach().clone()
    for step in range(STEPS):
        own.zero_grad()
        for rank in range(comm.size):
            alone.which = (rank * (step % 2) + step // 2) % 2
            x, y = batch(alone, rank, step, 2)
            (F.cross_entropy(alone(x), y) / comm.size).backward()
        own.step()
        model.which = (comm.rank * (step % 2) + step // 2) % 2
        train(learner, step, 2)
        assert np.abs(values(model) - values(alone)).max() < 1e-9
    assert torch.equal(model.never.weight, never)


def test_frozen_parameters_are_rank_0s_and_stay(comm):
    model = made(MLP, seed=comm.rank)
    model[0].weight.requires_grad_(False)
    expected = made(MLP)[0].weight.detach()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    learner = psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(), comm)
    assert "0.weight" not in learner.parameters
    for step in range(2):
        train(learner, step, 2)
    assert torch.equal(model[0].weight, expected)


def test_sparse_gradients_are_made_dense(comm):
    def build(sparse: bool) -> nn.Module:
        return nn.Sequential(nn.Embedding(7, 3, sparse=sparse), nn.Flatten(), nn.Linear(6, 5))

    alone, model = made(lambda: build(False)), made(lambda: build(True))
    own, learner = OPTIMIZERS["momentum"](alone), learner_of(model, comm)
    sparse: list[bool] = []
    model[0].weight.register_hook(lambda gradient: sparse.append(gradient.is_sparse))
    for step in range(STEPS):
        ids = [torch.tensor([[step % 7, 2], [3, (step + k) % 7]]) for k in range(comm.size)]
        y = torch.tensor([0, 4])
        own.zero_grad()
        F.cross_entropy(alone(torch.cat(ids)), y.repeat(comm.size)).backward()
        own.step()
        F.cross_entropy(model(ids[comm.rank]), y).backward()
        learner.step(samples=2)
    assert sparse == [True] * STEPS
    assert np.abs(values(model) - values(alone)).max() < 1e-9


def scaled(scaler: Any, loss: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = scaler.scale(loss)
    return out


@pytest.mark.parametrize("bits", [32, 1])
def test_loss_scaling(comm, bits):
    """An overflow on one rank skips the minibatch on all, and residuals stay; the scale goes down
    on all. Otherwise the scale has no influence: the residuals are of the gradient itself."""
    algorithm = psgd.DataParallelSGD(gradient_bits=bits)
    plain, model = (made(MLP, dtype=torch.float32) for _ in range(2))
    unscaled = learner_of(plain, comm, algorithm=algorithm)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    learner = learner_of(model, comm, algorithm=algorithm, scaler=scaler)
    scales = []
    for step in range(STEPS):
        x, y = batch(model, comm.rank, step, 2)
        loss = F.cross_entropy(model(x), y)
        if step == 4:
            before, clock = values(model), learner.samples
            residuals = copy.deepcopy(learner.state.exchange.residuals)
            if comm.rank == comm.size - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            assert learner.step(samples=2) == 2 * comm.size
            assert learner.samples == clock + 2 * comm.size
            assert np.array_equal(values(model), before)
            if bits == 1:
                after = learner.state.exchange.residuals
                assert np.array_equal(after.worker_error, residuals.worker_error)
                assert after.worker_error.any()
        else:
            scaler.scale(loss).backward()
            learner.step(samples=2)
            train(unscaled, step, 2)
            assert np.array_equal(values(model), values(plain))
        scales.append(scaler.get_scale())
    assert scales[:4] == [1024, 1024, 2048, 2048] and scales[4] == 1024
    assert comm.allgather_object(scales) == [scales] * comm.size


def test_loss_scaling_where_ranks_step_alone(comm):
    """The rank that overflows leaves out its own step; its samples count for the clock."""
    model = made(MLP, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    learner = learner_of(model, comm, "adamw", psgd.ModelAveragingSGD(sync_steps=3), scaler=scaler)
    last = comm.rank == comm.size - 1
    for step in range(6):
        x, y = batch(model, comm.rank, step, 2)
        overflows, before = last and step in (1, 3), values(model)
        loss = F.cross_entropy(model(x), y) * (float("inf") if overflows else 1)
        scaler.scale(loss).backward()
        learner.step(samples=2)
        moved = not np.array_equal(values(model), before)
        assert moved == (not overflows)
    assert scaler.get_scale() == (1 if last else 4)
    assert learner.samples == 12 * comm.size
    models = comm.allgather_object(values(model).tobytes())
    assert len(set(models)) == 1


def test_ranks_that_run_dry(comm):
    """Each rank has as much as it has; the others' minibatches count without it."""
    alone, model = made(MLP), made(MLP)
    own, learner = OPTIMIZERS["momentum"](alone), learner_of(model, comm)
    for step in range(2 * comm.size):
        counts = [2 if step < 2 * (rank + 1) else 0 for rank in range(comm.size)]
        x, y = joined(alone, step, counts)
        own.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        own.step()
    for step in range(2 * (comm.rank + 1)):
        train(learner, step, 2)
    learner.run_dry()
    learner.finish()
    assert np.abs(values(model) - values(alone)).max() < 1e-9


def test_pytorchs_own_state_dicts(comm):
    """Of the model and the optimizer, taken up by a plain PyTorch program and by a new learner."""
    model = made(MLP)
    optimizer = OPTIMIZERS["adamw"](model)
    learner = psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(), comm)
    for step in range(3):
        train(learner, step, 2)
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    learner.close()
    again, alone = made(MLP, seed=1), made(MLP, seed=2)
    second, own = OPTIMIZERS["adamw"](again), OPTIMIZERS["adamw"](alone)
    other = psgd.torch.Learner(again, second, psgd.DataParallelSGD(), comm)
    for module, rule in ((again, second), (alone, own)):
        module.load_state_dict(saved[0])
        rule.load_state_dict(copy.deepcopy(saved[1]))
    for step in range(3, 6):
        train(other, step, 2)
        own.zero_grad()
        x, y = joined(alone, step, [2] * comm.size)
        F.cross_entropy(alone(x), y).backward()
        own.step()
    assert np.abs(values(again) - values(alone)).max() < 1e-9


def test_schedulers_go_on_as_they_are(comm):
    alone, model = made(MLP), made(MLP)
    own = torch.optim.SGD(alone.parameters(), lr=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    learner = psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(), comm)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in (own, optimizer)]
    for step in range(6):
        train_alone(alone, own, step, comm.size)
        own.step()
        train(learner, step, counts_of(comm.size, step)[comm.rank])
        for schedule in schedules:
            schedule.step()
    assert learner.local_step.lr == pytest.approx(0.025)
    assert np.abs(values(model) - values(alone)).max() < 1e-9


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.threads(1)
def test_what_nobody_holds_is_given_back(comm, overlap):
    learner = learner_of(made(MLP), comm, algorithm=psgd.DataParallelSGD(overlap=overlap))
    for step in range(3):
        train(learner, step, 2)
    learner, gone = None, ref(learner)
    gc.collect()
    assert gone() is None
