"""Every algorithm with PyTorch's models: trains, and resumes bit for bit at any step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_models import MODELS, OPTIMIZERS, batch, made, values

import parallel_sgd as psgd
from parallel_sgd import Communicator, UserError

pytestmark = [
    pytest.mark.usefixtures("no_waiting_for_the_disk"),
    pytest.mark.threads(2),
    pytest.mark.ranks(4),
]

STEPS, STOP = 7, 4

ALGORITHMS = {
    "32 bit": psgd.DataParallelSGD(),
    "1 bit": psgd.DataParallelSGD(gradient_bits=1),
    "4 bit, overlap": psgd.DataParallelSGD(gradient_bits=4, overlap=True),
    "double buffering": psgd.DataParallelSGD(gradient_bits=1, double_buffering=True),
    "PowerSGD": psgd.PowerSGD(rank=1),
    "model averaging": psgd.ModelAveragingSGD(sync_steps=3),
    "block momentum": psgd.BlockMomentumSGD(sync_steps=3, gradient_bits=8),
    "SlowMo": psgd.SlowMo(sync_steps=3, inner_state="zero"),
    "DiLoCo": psgd.DiLoCo(sync_steps=3, inner_state="average"),
    "servers": psgd.DataParallelASGD(mode="sync", currency="deltas", sync_steps=2),
}


class WithDropout(nn.Sequential):
    """Whose result depends on PyTorch's random generator, and with BatchNorm."""

    inputs = (6,)

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Linear(12, 5))


def learner_of(model: nn.Module, comm: Communicator, optimizer: str, algorithm: Any) -> Any:
    return psgd.torch.Learner(model, OPTIMIZERS[optimizer](model), algorithm, comm)


def train(learner: Any, first: int, last: int) -> None:
    if learner.serves:
        return
    for step in range(first, last):
        x, y = batch(learner.model, learner.comm.rank, step, 3)
        F.cross_entropy(learner.model(x), y).backward()
        learner.step(samples=3)


def folder_of_all(comm: Communicator, path: Path) -> Path:
    return Path(comm.allgather_object(str(path))[0])


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    ("model", "optimizer"), [("mlp", "momentum"), ("attention", "adamw"), ("convnet", "groups")]
)
def test_resumes_bit_for_bit(comm, tmp_path, name, model, optimizer):
    """Every algorithm trains, and goes on in another learner as if nothing had happened."""
    folder = folder_of_all(comm, tmp_path)
    one, two = (made(MODELS[model], dtype=torch.float32) for _ in range(2))
    start = values(one)
    first = learner_of(one, comm, optimizer, ALGORITHMS[name])
    train(first, 0, STOP)
    with psgd.Checkpoints(folder) as checkpoints:
        checkpoints.save(first)
    train(first, STOP, STEPS)
    first.finish()
    second = learner_of(two, comm, optimizer, ALGORITHMS[name])
    psgd.load_checkpoint(second, folder)
    assert second.serves or second.samples == STOP * 3 * second.comm.size
    train(second, STOP, STEPS)
    second.finish()
    assert np.array_equal(values(one), values(two))
    assert not np.array_equal(values(one), start)
    for (buffer, own), (_, again) in zip(one.named_buffers(), two.named_buffers(), strict=True):
        assert torch.equal(own, again), buffer
    for learner in (first, second):
        learner.close()


@pytest.mark.parametrize("stop", range(4))
@pytest.mark.threads(1)  # a process has one generator, and a thread could not tell whose turn it is
def test_random_generators_go_on(comm, tmp_path, stop):
    folder = folder_of_all(comm, tmp_path)
    torch.manual_seed(100 + comm.rank)
    one = made(WithDropout, dtype=torch.float32)
    first = learner_of(one, comm, "adamw", psgd.DataParallelSGD(gradient_bits=1))
    train(first, 0, stop)
    with psgd.Checkpoints(folder) as checkpoints:
        checkpoints.save(first)
    train(first, stop, STEPS)
    two = made(WithDropout, dtype=torch.float32, seed=7)
    second = learner_of(two, comm, "adamw", psgd.DataParallelSGD(gradient_bits=1))
    torch.manual_seed(0)
    psgd.load_checkpoint(second, folder)
    train(second, stop, STEPS)
    assert np.array_equal(values(one), values(two))


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "adagrad"])
def test_another_number_of_ranks_takes_over(comm, tmp_path, optimizer):
    """With the mean of what the ranks had: in data-parallel SGD all have the same."""
    folder = folder_of_all(comm, tmp_path)
    algorithm = psgd.DataParallelSGD(gradient_bits=4)
    one = made(MODELS["convnet"], dtype=torch.float32)
    learner = learner_of(one, comm, optimizer, algorithm)
    train(learner, 0, STOP)
    with psgd.Checkpoints(folder) as checkpoints:
        checkpoints.save(learner)
    lost = np.sum(comm.allgather_object(learner.state.exchange.residuals.worker_error), axis=0)
    means = np.mean(comm.allgather_object(one.norm.running_mean.numpy()), axis=0)
    if comm.rank == 0:
        two = made(MODELS["convnet"], dtype=torch.float32, seed=3)
        alone = learner_of(two, Communicator.single(), optimizer, algorithm)
        psgd.load_checkpoint(alone, folder)
        assert np.array_equal(values(one), values(two))
        own, again = (m.local_step.state for m in (learner, alone))
        assert own.buffers.keys() == again.buffers.keys() != set()
        for key, vector in own.buffers.items():
            assert np.array_equal(vector, again.buffers[key]) and vector.any()
        residuals = alone.state.exchange.residuals
        assert np.allclose(residuals.worker_error, lost, atol=1e-6)
        assert np.allclose(two.norm.running_mean.numpy(), means, atol=1e-6)
        train(alone, STOP, STEPS)
        assert np.isfinite(values(two)).all()
    comm.barrier()


def test_what_a_checkpoint_is_not_for(comm, tmp_path):
    folder = folder_of_all(comm, tmp_path)
    model = made(MODELS["convnet"])
    model.last.requires_grad_(False)

    def made_of(model: nn.Module, rule: Any, **options: Any) -> Any:
        trained = [p for p in model.parameters() if p.requires_grad]
        return psgd.torch.Learner(
            model, rule(trained, **options), psgd.DataParallelSGD(), comm, buffers="local"
        )

    learner = made_of(model, torch.optim.SGD, lr=0.1)
    with psgd.Checkpoints(folder) as checkpoints:
        checkpoints.save(learner)
    other = made(MODELS["convnet"], seed=1)
    other.last.requires_grad_(False)
    for make, text in (
        (lambda: made_of(other, torch.optim.SGD, lr=0.1), "other frozen parameters"),
        (lambda: made_of(made(MODELS["convnet"]), torch.optim.SGD, lr=0.1), "another model"),
        (lambda: made_of(_frozen(), torch.optim.AdamW), "it was kind='SGD', and is 'AdamW'"),
    ):
        with pytest.raises(UserError, match=text):
            psgd.load_checkpoint(make(), folder)
    again = made_of(_frozen(), torch.optim.SGD, lr=0.7)
    psgd.load_checkpoint(again, folder)
    assert again.local_step.lr == 0.1  # a scheduler's doing, which goes on


def _frozen() -> nn.Module:
    model = made(MODELS["convnet"])
    model.last.requires_grad_(False)
    return model
