"""What a program assigns to a learner has an effect, or is refused."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

import parallel_sgd as psgd


def array_learner():
    parameters = psgd.Parameters({"w": np.ones(3, np.float32)})
    comm = psgd.Communicator.single()
    return psgd.Learner(parameters, psgd.SGD(lr=0.5), psgd.DataParallelSGD(), comm)


def torch_learner():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    comm = psgd.Communicator.single()
    return psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(), comm)


@pytest.mark.parametrize("made", [array_learner, torch_learner])
def test_what_would_be_ignored_is_refused(made):
    learner = made()
    arguments = set(inspect.signature(type(learner)).parameters)
    assert arguments | {"gradient", "lr"} <= set(learner.fixed)
    for name in learner.fixed:
        before = getattr(learner, name, None)
        with pytest.raises(psgd.UserError, match=rf"^learner\.{name} = \.\.\. would have no eff"):
            setattr(learner, name, object())
        assert getattr(learner, name, None) is before


@pytest.mark.parametrize("made", [array_learner, torch_learner])
def test_what_changes_nothing_may_be_assigned(made):
    learner = made()
    for name in learner.fixed.keys() - {"lr"}:
        if hasattr(learner, name):
            setattr(learner, name, getattr(learner, name))
    if made is array_learner:
        learner.model = learner.scaler = "the program's own"
        assert learner.model == "the program's own"


def test_what_is_changed_in_place_counts():
    learner = array_learner()
    gradient = learner.gradient.like()
    gradient["w"] = [2, 4, 6]
    with pytest.raises(psgd.UserError, match=r"gradient = .*: fill it in place, learner\.gradien"):
        learner.gradient = gradient
    learner.gradient.flat = gradient.flat
    learner.samples, learner.own_name = 5, "the program's"
    assert learner.step(samples=2) == 2 and learner.samples == 7
    assert learner.parameters["w"].tolist() == [0.5, 0, -0.5]
