"""Models that a function in a file of the user's makes, for train.py."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import parallel_sgd as psgd
from parallel_sgd import UserError
from parallel_sgd.command_line import TrainingData, make_model, read
from parallel_sgd.training import read_model

torch = pytest.importorskip("torch")
from parallel_sgd.torch.tasks import objective_for  # noqa: E402

FILE = """\
from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import numpy as np
import torch
from beside import WIDTH

import parallel_sgd as psgd


@dataclass
class Sizes:
    hidden: int = WIDTH


def module(shape, outputs, dtype=torch.float32):
    first, last = torch.nn.Linear(*shape, Sizes().hidden), torch.nn.Linear(3, outputs)
    return torch.nn.Sequential(first, torch.nn.Dropout(), last).to(dtype)


def doubles(shape, outputs):
    return module(shape, outputs, torch.float64)


def model(shape, outputs):
    made = psgd.models.SoftmaxRegression(*shape, outputs)
    made.parameters.flat[...] = np.random.rand(made.parameters.flat.size) + random.random()
    return made


def nothing(shape, outputs):
    return None


def leaves(shape, outputs):
    sys.exit(0)
"""


@pytest.fixture
def made(tmp_path):
    """Makes the model of a function in the file, with a seed."""
    (tmp_path / "beside.py").write_text("WIDTH = 3\n")
    (tmp_path / "own.py").write_text(FILE)
    arrays = psgd.data.Arrays(np.eye(4, dtype=np.float32), np.arange(4))
    data = TrainingData(arrays, None, arrays, psgd.data.Task("classification", 4, 4))

    def make(name, seed=0):
        given = ["--model", f"{tmp_path / 'own.py'}:{name}", "--seed", str(seed)]
        options, algorithm, optimizer = read(given)
        return make_model(options, data), algorithm, optimizer, options

    return make


def parameters(made, name, seed=0):
    model, algorithm, optimizer, options = made(name, seed)
    with model.learner(optimizer, algorithm, psgd.Communicator.single(), options) as learner:
        return learner.parameters.flat.copy()


@pytest.mark.parametrize("name", ["module", "model"])
def test_initial_values_are_those_of_the_seed(made, name):
    first = parameters(made, name)
    assert np.array_equal(first, parameters(made, name))
    assert not np.array_equal(first, parameters(made, name, seed=1))


def test_dropout_is_that_of_the_seed(made):
    def drawn(seed):
        parameters(made, "module", seed)
        return torch.rand(4)

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))


def test_a_model_of_doubles_is_given_doubles(made):
    assert made("doubles")[0].objective.dtype == np.float64
    assert made("module")[0].objective.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nothing", "it must be a torch.nn.Module or a Model: it is None"),
        ("leaves", "SystemExit: 0"),
        ("missing", "has no function 'missing'"),
    ],
)
def test_what_is_no_model(made, name, problem):
    with pytest.raises(UserError, match=re.escape(problem)):
        made(name)


def test_a_file_that_leaves(made, tmp_path):
    (tmp_path / "own.py").write_text("raise SystemExit(0)")
    with pytest.raises(UserError, match=r"own\.py cannot be run: SystemExit: 0"):
        made("module")


def test_a_seed_below_zero():
    with pytest.raises(UserError, match="seed=-1 must be a whole number, at least 0"):
        read(["--seed", "-1"])


class WithBuffers(torch.nn.Module):
    """Whose outputs depend on frozen parameters and on buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.register_buffer("short", torch.ones(4, dtype=torch.bfloat16))
        self.register_buffer("turn", torch.ones(4, dtype=torch.complex64))
        self.register_buffer("on", torch.zeros((), dtype=torch.bool))
        self.register_buffer("own", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.short, self.turn = self.short / 2, self.turn * 1j
            self.on = torch.ones_like(self.on)
        x = self.norm(self.frozen(x) * 5 + 3)
        out: torch.Tensor = self.last(x) + self.short + self.turn.real * self.on
        return out


def with_buffers(seed: int) -> Any:
    torch.manual_seed(seed)
    model = WithBuffers()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    return psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(), psgd.Communicator.single())


def test_a_runs_folder_has_all_that_a_pytorch_model_computes_with(tmp_path):
    """A model that begins with its file gives the same outputs, and learns on from there."""
    learner = with_buffers(1)
    x, y = torch.randn(32, 4), torch.arange(32) % 4
    for _ in range(5):
        torch.nn.functional.cross_entropy(learner.model(x), y).backward()
        learner.step(samples=32)
    learner.finish()
    folder = psgd.RunFolder(tmp_path / "run")
    folder.create()
    folder.write_model(learner.model_arrays())
    values = read_model(tmp_path / "run")
    assert values.keys() == learner.model.state_dict().keys()
    objective = objective_for(WithBuffers(), "classification", 4, values=values)
    for model in (learner.model, objective.model):
        model.eval()
    assert torch.equal(learner.model(x), objective.model(x))
    for name, tensor in learner.model.state_dict().items():
        assert torch.equal(tensor, objective.model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda v: v.pop("norm.running_mean"), "its buffer norm.running_mean is missing, but here"),
        (lambda v: v.pop("frozen.weight"), "its parameter frozen.weight is missing, but here"),
        (lambda v: v.update(on=np.ones(1, bool)), r"its buffer on is \[1\], but here \[\]"),
        (lambda v: v.update(on=np.float32(1)), "its buffer on is of float32, but here of bool"),
        (lambda v: v["last.bias"].fill(np.nan), "its parameter last.bias must hold finite numbers"),
        (lambda v: v.update(more=np.zeros(2)), "its parameter more is .*, but here there is none"),
    ],
)
def test_a_file_of_another_pytorch_model_changes_nothing(change, problem):
    values = {name: np.array(a) for name, a in with_buffers(1).model_arrays().items()}
    change(values)
    model = with_buffers(2).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=problem):
        objective_for(model, "classification", 4, values=values, name="run")
    assert all(torch.equal(tensor, before[n]) for n, tensor in model.state_dict().items())
