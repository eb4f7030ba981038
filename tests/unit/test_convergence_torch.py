"""The convergence benchmark's PyTorch tasks in small: they learn as ours do."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmark_players import options_of
from torch import nn

from benchmarks.convergence import cells, command
from benchmarks.convergence.cells import Cell
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.training import FIRST_TUNING_SEED, Run, train
from parallel_sgd.models import MLP

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch, at itself

SIZES = [64, 16, 10]
POINTS = 4


class AsPyTorch(nn.Module):
    """The MLP of a seed, its parameters in the same layout."""

    def __init__(self, seed):
        super().__init__()
        for name, array in MLP(SIZES, seed=seed).parameters.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(array)))

    def forward(self, x):
        return torch.relu(x @ self.W1 + self.b1) @ self.W2 + self.b2


@pytest.fixture
def digits(monkeypatch):
    """Tasks "ours" and "theirs": the same model, of ours and of PyTorch's."""
    ours = replace(
        TASKS["digits"],
        samples=2048,
        points=POINTS,
        tuning_seeds=1,
        warm_up=1 / 4,
        model=lambda seed: MLP(SIZES, seed=seed),
    )
    theirs = replace(ours, model=AsPyTorch, torch=True)
    monkeypatch.setitem(TASKS, "ours", ours)
    monkeypatch.setitem(TASKS, "theirs", theirs)


def a_run(task="theirs", contender="32", optimizer="momentum", ranks=4, lr=0.05, seed=0):
    return Run(task, contender, optimizer, ranks, lr, (), seed, samples=2048)


@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize(
    ("contender", "optimizer", "lr"),
    [
        ("32", "SGD", 0.4),
        ("32", "momentum", 0.05),
        ("32", "Adam", 0.012),
        ("32", "AdamW", 0.012),
        ("1", "momentum", 0.05),
        ("4-then-1", "SGD", 0.4),
        ("PowerSGD-4", "momentum", 0.05),
    ],
)
def test_pytorch_learns_what_ours_learns(contender, optimizer, lr):
    ours, theirs = (train(a_run(task, contender, optimizer, lr=lr)) for task in ("ours", "theirs"))
    # Gradients differ in their last bits. So a value in the middle of two multiples of the step is
    # rounded up or down, and lengths differ.
    rounds = contender in ("1", "4-then-1")
    assert ours.losses == pytest.approx(theirs.losses, abs=0.06 if rounds else 2e-3)
    assert len(ours.losses) == POINTS and theirs.losses[-1] < theirs.losses[0]
    assert ours.bytes_sent == pytest.approx(theirs.bytes_sent, rel=0.05 if rounds else 0)


@pytest.mark.usefixtures("digits")
def test_a_run_of_pytorch_repeats():
    run, before = a_run(contender="1", optimizer="AdamW", lr=0.012), torch.get_rng_state()
    outcome = train(run)
    assert train(run) == outcome != train(replace(run, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(train(replace(run, seed=FIRST_TUNING_SEED)).losses) == 1


@pytest.mark.usefixtures("digits")
def test_a_run_of_pytorch_that_diverges_counts_as_knowing_nothing():
    assert train(a_run(lr=1e30)).losses == (pytest.approx(math.log(10), abs=1e-4),) * POINTS


@pytest.mark.usefixtures("digits")
def test_a_study_of_pytorch_from_beginning_to_end(monkeypatch):
    cell = Cell("theirs", ("32", "1-then-0.25"), 4, "momentum", 0.05)
    monkeypatch.setitem(cells.STUDIES, "compression", (cell,))
    line = "convergence --study compression --task theirs --seeds 2 --jobs 1"
    report = command.main(options_of(line))
    (rows,) = report.tables.values()
    for row, result in zip(rows, report.groups[cell], strict=True):
        assert float(row["test loss"]) == pytest.approx(result.final.mean(), abs=1e-4)
    assert float(rows[0]["bits sent"]) == pytest.approx(2 * 32, rel=0.01)  # to all ranks at once


@pytest.mark.parametrize(("name", "values"), [("transformer", 236_928), ("lstm", 197_888)])
def test_the_tasks(name, values):
    task = TASKS[name]
    assert task.values == values
    training, test = task.data(0, task.budget(4))
    assert len(training) == task.budget(4)  # none is seen twice, no minibatch is short
    x, y = test.read(np.arange(2), dtype=None)
    assert x.shape == (2, 64) and task.model(0)(torch.from_numpy(x)).shape[-1] == task.classes
    assert y.max() < task.classes and np.array_equal(x[:, 1:], y[:, :-1])
