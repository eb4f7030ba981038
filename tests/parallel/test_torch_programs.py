"""Programs that do more with a PyTorch model than the plain loop does."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_models import MLP, batch, made, values

import parallel_sgd as psgd

pytestmark = [pytest.mark.threads(1, 2), pytest.mark.ranks(2)]


def penalized(model: nn.Module, x: torch.Tensor, y: torch.Tensor, first: Any) -> None:
    """A penalty of the gradient's size, through ``p.grad``, which keeps its graph."""
    with first:
        F.cross_entropy(model(x), y).backward(create_graph=True)
    sum(p.grad.pow(2).sum() for p in model.parameters()).backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.filterwarnings("ignore:all ranks have had the same gradient:UserWarning")
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_of_gradients(comm, overlap):
    """All ranks have the same minibatch: then the penalty is that of one process."""
    alone, model = made(MLP), made(MLP)
    own, optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model))
    learner = psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(overlap=overlap), comm)
    for step in range(4):
        x, y = batch(model, 0, step, 3)
        own.zero_grad()
        penalized(alone, x, y, nullcontext())
        own.step()
        penalized(model, x, y, learner.no_sync())
        learner.step(samples=3)
        assert np.abs(values(model) - values(alone)).max() < 1e-12


class Slower(torch.optim.SGD):
    """With attributes that PyTorch leaves out of a copy."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.factor, self.steps = 0.9, [0]

    def step(self, closure: Any = None) -> Any:
        self.steps[0] += 1
        for group in self.param_groups:
            group["lr"] *= self.factor
        return super().step(closure)


def test_an_optimizer_of_the_programs_own(comm):
    alone, model = made(MLP), made(MLP)
    own, optimizer = Slower(alone.parameters()), Slower(model.parameters())
    learner = psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(), comm)
    for step in range(3):
        x, y = batch(model, 0, step, 3)
        own.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        own.step()
        F.cross_entropy(model(x), y).backward()
        learner.step(samples=3)
    assert np.abs(values(model) - values(alone)).max() < 1e-12
    assert optimizer.steps == own.steps == [3]  # and none of a copy's
