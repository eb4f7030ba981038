"""Ranks die while they train a PyTorch model, and the others go on: as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from failures import Failure, FailurePlan
from test_rollback import RANKS
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import parallel_sgd as psgd
from parallel_sgd import UserError
from parallel_sgd.communication import Communicator, simulate_recovery
from parallel_sgd.testing import Outcome, explore

SAMPLES, MINIBATCH, EPOCHS = 23, 6, 3
TOTAL = SAMPLES * EPOCHS


class Net(nn.Module):
    """With a layer that is frozen, statistics, and a parameter that most samples do not use."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.first, self.second = nn.Linear(6, 30), nn.Linear(30, 3)
        self.norm = nn.BatchNorm1d(30) if norm else nn.Identity()
        self.rare = nn.Parameter(torch.ones(3))

    def forward(self, x: Any) -> Any:
        y = self.second(self.norm(self.first(self.frozen(x))).relu())
        rare = x[:, 0] > 1
        return torch.where(rare[:, None], y * self.rare, y) if rare.any() else y


def train(
    algorithm: Any,
    optimizer: Callable[..., Any] = torch.optim.Adam,
    *,
    norm: bool = False,
    workers: int = 0,
    dtype: torch.dtype = torch.float64,
    minibatch: int = MINIBATCH,
    scaled: bool = False,
) -> Callable[..., Any]:
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.standard_normal((SAMPLES, 6))).to(dtype)
    data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), torch.arange(SAMPLES))

    def score(model: nn.Module, x: Any, y: Any, _: Any) -> dict[str, Any]:
        return {"loss": F.cross_entropy(model(x), y)}

    def body(comm: Communicator) -> Any:
        joins = comm.generation > 0
        model, own = Net(norm).to(dtype), np.random.default_rng(comm.generation)
        for p in model.parameters():  # on a rank that joins something else
            p.data = torch.from_numpy(own.standard_normal(p.shape) / 5).to(dtype)
        steps = optimizer(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=4, enabled=scaled)
        learner = psgd.torch.Learner(
            model, steps, algorithm, comm, commit_every=3, scaler=scaler if scaled else None
        )
        sampler = psgd.torch.sampler(data, learner, minibatch)
        ahead = {"prefetch_factor": 3, "persistent_workers": True} if workers else {}
        loader = DataLoader(data, batch_sampler=sampler, num_workers=workers, **ahead)
        losses = {}
        with learner:
            for epoch in sampler.epochs(EPOCHS):
                model.train()
                for inputs, labels, _ in loader:
                    scaler.scale(F.cross_entropy(model(inputs), labels)).backward()
                    learner.step(samples=len(inputs))
                losses[epoch] = learner.evaluate([data[comm.rank :: comm.size]], score)["loss"]
            learner.finish()
            assert learner.recovery is not None
            lost = learner.recovery.report()["recovery"]
        state = {name: value.numpy().copy() for name, value in model.state_dict().items()}
        state["scale"] = np.array(scaler.get_scale())
        return state, learner.samples, lost, comm.size, losses, joins

    return body


def undisturbed(body: Callable[..., Any]) -> tuple[dict[str, Any], dict[int, float]]:
    results = simulate_recovery(RANKS, body, timeout_s=30)
    assert [result[3] for result in results] == [RANKS] * RANKS
    return results[0][0], results[0][4]


def after_a_kill(body: Callable[..., Any], number: int, spares: int) -> list[Any] | None:
    """What those that are left have; None where the program was at its end before."""
    rank = number % RANKS
    with FailurePlan(Failure(rank, meeting=number)) as plan:
        results = simulate_recovery(RANKS, body, spares=spares, timeout_s=30)
    assert (results[rank] is None) == plan.struck
    left = [result for result in results if result is not None]
    assert len(left) >= RANKS - 1
    for state, samples, lost, size, losses, _ in left:
        assert size == len(left) and samples == TOTAL
        assert lost["ranks_lost"] == [rank] * plan.struck
        assert lost["samples_trained_again"] <= 8 * MINIBATCH
        for name, value in state.items():
            assert np.array_equal(value, left[0][0][name]), f"replicas differ in {name}"
        assert losses.keys() <= {*range(EPOCHS)} and EPOCHS - 1 in losses
    return left if plan.struck else None


def as_if_nobody_had_died(body: Callable[..., Any], numbers: range, spares: int) -> int:
    """See that it is so to rounding, and return how often a standby rank has taken the place bit
    for bit. If it joins only after some steps, these were taken by one rank less."""
    (expected, losses), same, grown = undisturbed(body), 0, 0
    for number in numbers:
        left = after_a_kill(body, number, spares)
        if left is None:
            break
        state, _, _, size, last, _ = left[0]
        assert any(result[-1] for result in left) == (size == RANKS), "a spare has joined"
        grown += size == RANKS
        for name, value in expected.items():
            assert np.allclose(state[name], value, rtol=1e-9, atol=1e-11), (number, name)
        trained = [name for name in expected if not name.startswith("norm.")]  # not statistics
        same += size == RANKS and all(np.array_equal(state[k], expected[k]) for k in trained)
        if size == RANKS:
            assert np.isclose(last[EPOCHS - 1], losses[EPOCHS - 1]) or number > 130
    assert same >= 0.7 * grown
    return same


def test_every_sample_is_trained_on_once() -> None:
    body = train(psgd.DataParallelSGD())
    assert as_if_nobody_had_died(body, range(2, 200, 13), 0) == 0


def test_a_spare_takes_the_place() -> None:
    """With a model of its own at first, of which nothing is left, nor of its frozen layer."""
    body = train(psgd.DataParallelSGD(), scaled=True)
    assert as_if_nobody_had_died(body, range(31, 200, 13), 1) > 4


@pytest.mark.parametrize("spares", [0, 1])
def test_minibatches_that_were_fetched_ahead_are_dealt_out_anew(spares: int) -> None:
    body = train(psgd.DataParallelSGD(), workers=1)
    grown = as_if_nobody_had_died(body, range(47, 120, 31 + 20 * spares), spares)
    assert (grown > 1) == bool(spares)


def test_statistics_go_back() -> None:
    body = train(psgd.DataParallelSGD(), norm=True, minibatch=12)
    for number in (40, 57, 91):
        assert after_a_kill(body, number, number % 2)


@pytest.mark.parametrize(
    "algorithm",
    [
        psgd.DataParallelSGD(gradient_bits=4, overlap=True),
        psgd.DataParallelSGD(gradient_bits=8, double_buffering=True),
        psgd.BlockMomentumSGD(sync_steps=3),
    ],
    ids=["overlap", "double buffering", "blocks"],
)
def test_other_algorithms_go_on(algorithm: Any) -> None:
    body = train(algorithm, torch.optim.SGD, dtype=torch.float32)
    expected, _ = undisturbed(body)
    for number in (41, 58, 75, 90):
        left = after_a_kill(body, number, number % 2)
        if left is not None:
            for name, value in expected.items():
                assert np.allclose(left[0][0][name], value, atol=0.05), (number, name)


def test_all_ranks_evaluate_together() -> None:
    """Also where one has passed an evaluation, or not yet come to it, when another hears of a
    failure. Within an epoch they may roll back to before: then there are no means."""
    data = TensorDataset(torch.arange(24.0).reshape(12, 2).double(), torch.arange(12) % 2)

    def body(comm: Communicator) -> int:
        torch.manual_seed(1)
        model = nn.Linear(2, 2).double()
        steps, algorithm = torch.optim.SGD(model.parameters(), lr=0.1), psgd.DataParallelSGD()
        learner = psgd.torch.Learner(model, steps, algorithm, comm, commit_every=3)
        sampler = psgd.torch.sampler(data, learner, 6)

        def evaluate() -> dict[str, float]:
            return learner.evaluate([data[comm.rank :: comm.size]], lambda *_: {"loss": 0.0})

        with learner:
            for _ in sampler.epochs(3):
                for inputs, labels in DataLoader(data, batch_sampler=sampler):
                    F.cross_entropy(model(inputs), labels).backward()
                    if learner.step(samples=len(inputs)):
                        assert evaluate() in ({}, {"loss": 0.0})
                assert evaluate() == {"loss": 0.0}
            learner.finish()
        return learner.samples

    def check(outcome: Outcome) -> None:
        assert {one for one in outcome.results if one is not None} == {36}

    explore(body, ranks=3, faults=1, schedules=30, seed=90, may_fail=False, check=check)


@pytest.mark.parametrize("what", [psgd.torch.init_process_group, psgd.torch.hook_state])
def test_pytorchs_process_group_is_refused(what: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="cannot continue without a failed rank"):
        simulate_recovery(2, what)
