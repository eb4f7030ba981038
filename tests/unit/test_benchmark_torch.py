"""The benchmark of training with PyTorch on one or on both sides."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from benchmarks.training import costs, tasks
from benchmarks.training.contenders import CONTENDERS, PERIOD, PLAIN, names_for
from benchmarks.training.turns import Ranks, playing
from parallel_sgd import Communicator, UserError, simulate
from parallel_sgd.models import MLP, ByteLanguageModel

torch = pytest.importorskip("torch")

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of PyTorch, at itself
    from benchmarks.training import torch_trainers
    from benchmarks.training.modules import module_of, values_of

SINGLE = Communicator.single()
ALONE, ALONE_MODULES = Ranks(SINGLE), Ranks(SINGLE, modules=True)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A task of each kind that takes no time."""
    monkeypatch.setattr(tasks, "BATCH", 4)
    monkeypatch.setattr(torch_trainers, "IDLE_S", 0.05)
    transformer = partial(tasks._transformer, width=8, layers=1, heads=2)
    language = partial(ByteLanguageModel, 8, 4, [16], seed=1)
    for name, task in {
        "mlp": replace(tasks.TASKS["5M"], model=partial(MLP, [784, 8, 10], seed=1), batch=4),
        "language": replace(tasks.TASKS["bytes"], model=language, batch=4),
        "transformer": replace(
            tasks.TASKS["transformer"], model=transformer, test=tasks._sequences_tested
        ),
        "ResNet": replace(tasks.TASKS["ResNet"], batch=4),
    }.items():
        monkeypatch.setitem(tasks.TASKS, name, task)


@pytest.fixture
def process_group():
    with playing(SINGLE, [PLAIN], modules=True):
        yield


def test_modules_have_about_as_many_parameters_and_tensors_as_is_said():
    sizes = {
        name: [p.numel() for p in module_of(task.model())[1].parameters()]
        for name, task in tasks.MODULES.items()
    }
    millions = {name: round(sum(parts) / 1e6, 1) for name, parts in sizes.items()}
    assert millions == {"5M": 4.6, "24M": 23.9, "transformer": 4.9, "ResNet": 0.2}
    assert [len(sizes[name]) for name in ("transformer", "ResNet")] == [77, 47]


def test_a_module_has_the_initial_values_of_its_seed_on_every_rank():
    first, again, other = (
        values_of(*module_of(tasks.TASKS["text"].model(seed=seed))) for seed in (3, 3, 4)
    )
    assert np.array_equal(first, again) and not np.array_equal(first, other)


@pytest.mark.parametrize(
    "name", [name for name in names_for(True, False) if CONTENDERS[name].algorithm]
)
def test_our_learner_learns_and_ends_with_one_model(name):
    def rank(comm):
        with Ranks(comm, modules=True).training(name, "mlp", 0.002) as turn:
            return turn.steps(2 * PERIOD)[1], turn.same_model()

    (losses, same), _ = simulate(2, rank)
    assert losses[-1] < losses[0] and same == CONTENDERS[name].meets


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("ranks", "name", "task"),
    [
        *((ALONE, "no exchange", task) for task in ("mlp", "language")),
        *(
            (ALONE_MODULES, name, task)
            for name in ("no exchange", "our hook, 32 bit", "PyTorch, no exchange")
            for task in ("mlp", "transformer", "ResNet")
        ),
    ],
)
def test_all_take_the_very_steps_of_pytorchs_ddp(ranks, name, task):
    trained = []
    for who in (name, PLAIN):
        with ranks.training(who, task, 0.01) as turn:
            before = turn.trainer.values().copy()
            trained.append((before, turn.steps(3)[1], turn.trainer.values().copy()))
    for ours, theirs in zip(*trained, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert not np.array_equal(trained[0][0], trained[0][2])


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "name", ["DDP, fp16", "DDP, PowerSGD rank 4", "DDP, post-local SGD", "our hook, 1 bit"]
)
def test_hooks_learn(name):
    with ALONE_MODULES.training(name, "mlp", 0.002) as turn:
        losses, state = turn.steps(PERIOD)[1], turn.trainer.state
        assert losses[-1] < losses[0]
        assert not state or state.state_dict()["residuals"]
    if state:
        with pytest.raises(UserError, match="closed"):
            state.state_dict()


def test_the_test_loss_of_a_module_falls():
    with ALONE_MODULES.training("no exchange", "transformer", 0.1) as turn:
        first = turn.test_loss()
        turn.steps(20)
        assert first == pytest.approx(math.log(256), rel=0.02)
        assert turn.test_loss() < first - 0.5


def test_a_minibatch_that_is_not_finite_is_told_and_not_fatal():
    learner = ALONE_MODULES.trainer("no exchange", "mlp", 0.1)
    before = learner.values()
    x, y = tasks._synthetic(0, 1, 1)
    assert math.isnan(learner.step(np.full_like(x[0], np.nan), y[0]))
    assert np.array_equal(learner.values(), before)


def test_the_learners_own_cost_is_that_of_a_step_beside_a_plain_loops_and_ddps():
    cost = costs.OwnCost(**costs.measure_own(SINGLE, "mlp", most_steps=3))
    assert (cost.model, cost.steps) == ("mlp", 3)
    assert min(cost.seconds, cost.plain_seconds, cost.ddp_seconds) > 0
    assert costs.measure_own(SINGLE, "mlp", most_s=0)["steps"] == 1


def test_memory_is_what_a_rank_has_at_most_beyond_a_small_models():
    held = np.ones(1 << 23)
    found = costs.Memory(**costs.measure_memory(SINGLE, "mlp", "32 bit"))
    assert (found.model, found.contender) == ("mlp", "32 bit")
    assert found.before_bytes > held.nbytes and found.added_bytes >= 0
