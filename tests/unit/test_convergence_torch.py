"""The convergence benchmark's PyTorch tasks in small: they learn as ours do, and are measured."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmark_players import options_of
from torch import nn

from benchmarks.convergence import cells, command, tasks
from benchmarks.convergence.cells import Cell
from benchmarks.convergence.runs import load
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.training import FIRST_TUNING_SEED, Run, train
from parallel_sgd.data import Images
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
    theirs = replace(ours, model=AsPyTorch, torch=True, unit="%", margin=5)
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
def test_a_run_of_pytorch_repeats_and_is_measured_by_its_errors():
    run, before = a_run(contender="1", optimizer="AdamW", lr=0.012), torch.get_rng_state()
    outcome = train(run)
    assert train(run) == outcome != train(replace(run, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(outcome.losses) == len(outcome.errors) == POINTS
    assert 0 < outcome.errors[-1] < outcome.errors[0] < 90
    on_261 = outcome.errors[-1] * 2.61
    assert on_261 == pytest.approx(round(on_261), abs=1e-3)
    tuning = train(replace(run, seed=FIRST_TUNING_SEED))
    assert len(tuning.losses) == len(tuning.errors) == 1


@pytest.mark.usefixtures("digits")
def test_a_run_of_pytorch_that_diverges_counts_as_knowing_nothing():
    outcome = train(a_run(lr=1e30))
    assert outcome.losses == (pytest.approx(math.log(10), abs=1e-4),) * POINTS
    assert outcome.errors[-1] == 90 and len(outcome.errors) == POINTS


@pytest.mark.usefixtures("digits")
def test_errors_from_beginning_to_end(tmp_path, monkeypatch, capsys):
    cell, path = Cell("theirs", ("32", "1-then-0.25"), 4, "momentum", 0.05), tmp_path / "runs.json"
    monkeypatch.setitem(cells.STUDIES, True, (cell,))
    line = f"convergence --compression --task theirs --seeds 2 --jobs 1 --runs {path}"
    report = command.main(options_of(line))
    known = load(path)
    for result in report.groups[cell]:
        of_seeds = [
            outcome.errors
            for run, outcome in known.items()
            if run.contender == result.line.contender and run.seed < 2
        ]
        assert np.array_equal(result.curves, of_seeds)
    report.print()
    printed = capsys.readouterr().out
    assert "margin ±5 %" in printed and "| test error |" in printed
    (rows,) = report.tables.values()
    last = report.groups[cell][0].final.mean()
    assert float(rows[0]["test error"]) == pytest.approx(last, abs=1e-4)
    assert float(rows[0]["bits sent"]) == pytest.approx(2 * 32, rel=0.01)  # to all ranks at once


@pytest.mark.parametrize(
    ("name", "values", "shape"),
    [
        ("transformer", 236_928, (64,)),
        ("transformer-long", 236_928, (64,)),
        ("lstm", 197_888, (64,)),
        ("fashion-mnist", 174_970, (1, 28, 28)),
    ],
)
def test_the_tasks(name, values, shape, monkeypatch):
    """Images are made up, as many as Fashion-MNIST has."""
    images = [Images(np.zeros((n, 1, 28, 28), np.uint8), np.zeros(n, int)) for n in (60_000, 10)]
    monkeypatch.setattr(tasks, "_clothing", lambda: images)
    task = TASKS[name]
    assert task.values == values
    training, test = task.data(0, task.budget(4))
    assert len(training) % (4 * task.minibatch) == 0  # no minibatch is short
    assert task.budget(4) <= 2 * len(training)
    x, y = test.read(np.arange(2), dtype=np.float32)
    assert x.shape == (2, *shape) and task.model(0)(torch.from_numpy(x)).shape[-1] == task.classes
    assert y.max() < task.classes
    if name != "fashion-mnist":
        assert np.array_equal(x[:, 1:], y[:, :-1])
        assert len(training) == task.budget(4)  # none is seen twice
