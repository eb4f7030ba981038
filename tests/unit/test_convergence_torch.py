"""The convergence benchmark's PyTorch tasks in small: they learn as ours do, and are measured."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.convergence import compression, torch_tasks
from benchmarks.convergence.runs import Runs, read
from benchmarks.convergence.study import Plan
from benchmarks.convergence.task import ERROR
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.torch_tasks import TorchTask
from benchmarks.convergence.torch_trained import from_seed
from benchmarks.convergence.training import FIRST_TUNING_SEED, Outcome, Run, train
from benchmarks.convergence.tuning import Climb
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
    fields = {name: getattr(ours, name) for name in ours.__dataclass_fields__}
    theirs = TorchTask(**fields | {"model": AsPyTorch, "measure": ERROR, "margin": 5})
    monkeypatch.setitem(TASKS, "ours", ours)
    monkeypatch.setitem(TASKS, "theirs", theirs)
    return ours, theirs


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
    assert len(outcome.errors) == POINTS and outcome.curve(TASKS["theirs"]) == outcome.errors
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


def test_a_model_is_drawn_from_its_seed():
    before = torch.get_rng_state()
    weights = [from_seed(seed, lambda: nn.Linear(3, 3)).weight for seed in (5, 5, 6)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_errors_by_beginning_to_end(digits, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    cell = compression.Cell("theirs", 4, "momentum", ("32", "1-then-0.25", "sign"))
    monkeypatch.setattr(compression, "CELLS", (cell,))
    monkeypatch.setitem(compression.STARTS["momentum"], "theirs", 0.05)
    path = tmp_path / "runs.json"
    with Runs(path=str(path)) as runs:
        study = compression.carry_out(Plan(contenders=["1-then-0.25"], seeds=2), runs)
    whole, few = study.groups[cell]
    assert [r.setting.contender for r in (whole, few)] == ["32", "1-then-0.25"]
    for result in (whole, few):
        of_seeds = [train(run).errors for run in result.setting.runs(digits[1], range(2))]
        assert np.array_equal(result.curves, of_seeds)
    for run, outcome in read(path).items():
        assert outcome == runs.outcomes[run] and outcome.errors
    study.print()
    printed = capsys.readouterr().out
    assert printed.startswith("\nTest error in %, 2 seeds")
    assert "margin ±5 %, tuned on 1 other seeds" in printed
    assert "test error | less 32 bits" in re.sub(" +", " ", printed)
    rows = {row.name: row for row in study.rows}
    row = rows["theirs, K=4, momentum, 32 bits: test error"]
    assert row.unit == "%" and row.value == pytest.approx(whole.final.mean())
    sent = rows["theirs, K=4, momentum, 32 bits: sent"].value
    assert sent == pytest.approx(2 * 32, rel=0.01)  # so small a model goes to all ranks at once
    study.draw(tmp_path / "c.png")
    drawn = {path.stem for path in tmp_path.glob("c-*.png")}
    assert drawn == {"c-samples", "c-bytes", "c-distance"}


def test_runs_that_know_nothing_are_counted_by_their_errors(digits):
    climb = Climb("theirs", "32", "momentum", 4, start=0.05)
    report = climb.setting(5).report(digits[1], 2)
    runs = next(report)
    with pytest.raises(StopIteration) as end:
        report.send({runs[0]: Outcome((2.0,), 1, (90.0,)), runs[1]: Outcome((2.0,), 1, (80.0,))})
    assert end.value.value.diverged == "1 of 2 diverged, counted as 90.0"


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
    monkeypatch.setattr(torch_tasks, "_clothing", lambda: images)
    task = TASKS[name]
    assert task.values == values
    for shorter in (task, task.shortened(8, None)):
        assert shorter.steps_on(4) % shorter.points == 0 < shorter.steps_on(4)
    assert task.steps_on(4) % 4 == 0
    training, test = task.data(0, task.budget(4))
    assert len(training) % (4 * task.minibatch) == 0  # no minibatch is short
    assert task.budget(4) <= 2 * len(training)
    x, y = test.read(np.arange(2), dtype=np.float32)
    assert x.shape == (2, *shape) and task.model(0)(torch.from_numpy(x)).shape[-1] == task.classes
    assert y.max() < task.classes
    if name != "fashion-mnist":
        assert np.array_equal(x[:, 1:], y[:, :-1])
        assert len(training) == task.budget(4)  # none is seen twice
