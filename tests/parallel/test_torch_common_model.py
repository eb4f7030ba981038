"""What all ranks have in common of a PyTorch model: buffers, evaluation, and averages of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from torch_models import MLP, MODELS, OPTIMIZERS, batch, learner_of, made, train, values

import parallel_sgd as psgd
from parallel_sgd import UserError

pytestmark = [pytest.mark.few_ranks, pytest.mark.threads(1, 3), pytest.mark.ranks(2)]


def test_batchnorm_of_all_ranks(comm):
    """In training each rank has its own; then the mean, or rank 0's, or still its own."""
    for buffers in ("mean", "first", "local"):
        model = made(MODELS["convnet"], seed=comm.rank)
        learner = learner_of(model, comm, buffers=buffers)
        for step in range(3):
            train(learner, step, 4)
        own = comm.allgather_object(model.norm.running_mean.numpy().copy())
        if comm.size > 1:
            assert not np.array_equal(own[0], own[1])
        learner.finish()
        expected = {"mean": np.mean(own, axis=0), "first": own[0], "local": own[comm.rank]}
        assert np.allclose(model.norm.running_mean.numpy(), expected[buffers], atol=1e-15)
        assert int(model.norm.num_batches_tracked) == 3


class OnlyItems:
    """Batches by their numbers, as Python's oldest protocol of iteration has it."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __getitem__(self, number: int) -> Any:
        return self._batches[number]


def test_evaluation_is_of_the_model_of_all(comm):
    """Weighted by samples, with the model of the latest synchronization; and nothing remains."""
    model = made(MODELS["convnet"])
    learner = learner_of(model, comm, algorithm=psgd.ModelAveragingSGD(sync_steps=4))
    for step in range(6):  # two of them after the latest synchronization
        train(learner, step, 4)
    before, shared = values(model), learner.runner.common_model().copy()

    def score(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        assert not module.training and not torch.is_grad_enabled()
        assert np.array_equal(values(module), shared)
        return {"loss": F.cross_entropy(module(x), y), "y": y.double().mean()}

    parts = [batch(model, comm.rank, 100 + i, 3 + comm.rank) for i in range(comm.rank)]
    parts += [(x[:0], y[:0]) for x, y in parts[:1]]  # of which there is no mean
    results = learner.evaluate(OnlyItems(parts), score) if comm.size > 1 else {}
    if comm.size > 1:
        ys = np.concatenate(
            [y for part in comm.allgather_object([y.numpy() for _, y in parts]) for y in part]
        )
        assert results["y"] == pytest.approx(ys.mean(), rel=1e-12)
        assert comm.allgather_object(results) == [results] * comm.size
    assert model.training and np.array_equal(values(model), before)
    with pytest.raises(UserError, match="no rank has a sample"):
        learner.evaluate([], score)


def test_evaluation_weighs_batches_however_they_are_nested(comm):
    """Rank k has a batch of 5 samples, then one of k + 1."""
    learner = learner_of(made(MLP), comm)
    sizes = (5, comm.rank + 1)
    ys = [torch.arange(n) + 10.0 * i + comm.rank for i, n in enumerate(sizes)]
    everybody = [y for own in comm.allgather_object([y.numpy() for y in ys]) for y in own]
    nested = [[[y[:, None], y[:, None]], {"of": {"what": y}}] for y in ys]
    first = [(y.expand(3, len(y)), y) for y in ys]  # 3 steps of time, then the samples
    packed = [(pack_sequence([y[i : i + 1].expand(3) for i in range(len(y))]), y) for y in ys]

    def score(_: nn.Module, x: Any, y: Any) -> dict[str, Any]:
        return {"y": (y["of"]["what"] if isinstance(y, dict) else y).double().mean()}

    for batches, options in (
        (nested, {}),
        (packed, {}),
        (iter(first), {"samples": lambda batch: len(batch[1])}),
    ):
        found = learner.evaluate(batches, score, **options)["y"]
        assert found == pytest.approx(np.concatenate(everybody).mean(), rel=1e-6)
    mine = first if comm.rank == comm.size - 1 else packed
    with pytest.raises(UserError, match=rf"has 3, and .* samples=.*on rank {comm.size - 1}"):
        learner.evaluate(mine, score)
    learner.evaluate(packed, score)  # and training can go on


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "adagrad"])
@pytest.mark.parametrize("inner", ["keep", "zero", "average"])
def test_averaging_by_hand(comm, optimizer, inner):
    """Every rank steps alone; then models are averaged, and PyTorch's state as was asked for."""
    ranks = [made(MLP) for _ in range(comm.size)]
    own = [OPTIMIZERS[optimizer](model) for model in ranks]
    algorithm = psgd.ModelAveragingSGD(sync_steps=3, inner_state=inner)
    learner = learner_of(made(MLP), comm, optimizer, algorithm)
    for step in range(9):
        for rank, (model, rule) in enumerate(zip(ranks, own, strict=True)):
            x, y = batch(model, rank, step, 2)
            rule.zero_grad()
            F.cross_entropy(model(x), y).backward()
            rule.step()
        train(learner, step, 2)
        if step % 3 == 2:
            average(ranks)
            if inner == "zero":
                own = [OPTIMIZERS[optimizer](model) for model in ranks]
            elif inner == "average":
                average_states(own)
        assert np.abs(values(learner.model) - values(ranks[comm.rank])).max() < 1e-9


@torch.no_grad()
def average(models: list[nn.Module]) -> None:
    for same in zip(*(model.parameters() for model in models), strict=True):
        mean = sum(same) / len(same)
        for p in same:
            p.copy_(mean)


def average_states(optimizers: list[torch.optim.Optimizer]) -> None:
    """What is a number for each of a parameter's values."""
    for states in zip(*(rule.state.values() for rule in optimizers), strict=True):
        for key, value in states[0].items():
            if isinstance(value, torch.Tensor) and value.dim():
                mean = sum(state[key] for state in states) / len(states)
                for state in states:
                    state[key].copy_(mean)
