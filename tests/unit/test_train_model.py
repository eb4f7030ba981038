"""Models that a function in a file of the user's makes, for train.py."""

from __future__ import annotations

import re

import numpy as np
import pytest

import parallel_sgd as psgd
from parallel_sgd.command_line.train import read
from parallel_sgd.command_line.train_data import TrainingData
from parallel_sgd.command_line.train_model import make_model

torch = pytest.importorskip("torch")

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
        ("nothing", "it must be a torch.nn.Module or a Model: it is a NoneType"),
        ("leaves", "SystemExit: 0"),
        ("missing", "has no function 'missing'"),
    ],
)
def test_what_is_no_model(made, name, problem):
    with pytest.raises(psgd.UserError, match=re.escape(problem)):
        made(name)


def test_a_file_that_leaves(made, tmp_path):
    (tmp_path / "own.py").write_text("raise SystemExit(0)")
    with pytest.raises(psgd.UserError, match=r"own\.py cannot be run: SystemExit: 0"):
        made("module")


def test_a_seed_below_zero():
    with pytest.raises(psgd.UserError, match="seed=-1 must be a whole number, at least 0"):
        read(["--seed", "-1"])
