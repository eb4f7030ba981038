"""A checkpoint taken up by more and by fewer ranks: what must be kept is kept."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import BLOCK_SIZE, gradient_of, samples_of, zeros

import parallel_sgd as psgd
from parallel_sgd import Communicator, Learner, UserError, simulate
from parallel_sgd.algorithms import LocalUpdates, exchange_choices
from parallel_sgd.state import Weight, across, parts_of, weight_of
from parallel_sgd.training.state import reshard

LOSSY = {"gradient_bits": 1, "block_size": BLOCK_SIZE}
SIGNS = {"gradient_bits": 1, "code": "sign"}

ALGORITHMS: dict[str, psgd.Algorithm[Any]] = {
    "32 bits": psgd.DataParallelSGD(),
    "1 bit": psgd.DataParallelSGD(**LOSSY),
    "bits of their own": psgd.DataParallelSGD(**LOSSY, bits_of={"b": 32, "<10": 16, "c": 8}),
    "warm start": psgd.DataParallelSGD(**LOSSY, distributed_after=10**6),
    "averaging": psgd.ModelAveragingSGD(sync_period=8, inner_state="average"),
    "signs": psgd.DataParallelSGD(**LOSSY, code="sign"),
    "BMUF, 1 bit": psgd.BlockMomentumSGD(block_samples=60, reset_sgd_momentum=False, **LOSSY),
    "CNTK's": psgd.CNTKBlockMomentumSGD(sync_steps=3),
    "SlowMo": psgd.SlowMo(sync_steps=3),
    "DiLoCo, overlap, 1 bit": psgd.DiLoCo(sync_steps=3, overlap_samples=7, **LOSSY),
}

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def learner_of(algorithm: psgd.Algorithm[Any], comm: Communicator) -> Learner:
    parameters = zeros("large and small")
    parameters.flat[:] = np.linspace(-1, 1, parameters.flat.size)
    return Learner(parameters, psgd.Adam(lr=0.01), algorithm, comm)


def train(learner: Learner, step: int) -> None:
    rank = learner.comm.rank if learner.distributed else 0
    learner.gradient.flat[:] = gradient_of(rank, step, learner.gradient.flat.size)
    learner.step(samples_of(rank, step) if learner.distributed else 3)


@dataclass
class Ranks:
    """What all ranks hold together."""

    models: list[np.ndarray]
    m: list[np.ndarray]
    weights: list[Weight]
    steps: list[int]
    samples: list[int]
    sent: int
    state: list[Any]

    @classmethod
    def of(cls, learners: list[Learner]) -> Ranks:
        local = [learner.local_step.state for learner in learners]
        return cls(
            [learner.parameters.flat.copy() for learner in learners],
            [state.buffers["m"].copy() for state in local],
            [weight_of(learner.state) for learner in learners],
            [state.steps for state in local],
            [state.samples for state in local],
            sum(learner.bytes_sent for learner in learners),
            [learner.state for learner in learners],
        )

    def mean(self, vectors: list[np.ndarray]) -> np.ndarray:
        weights = [max(parts_of(weight, 0).values()) for weight in self.weights]
        given = weights if any(weights) else None
        return np.average(np.array(vectors, float), axis=0, weights=given)

    def residuals(self) -> tuple[np.ndarray, np.ndarray]:
        by_rank = [state.exchange.residuals for state in self.state]
        own = np.sum([residuals.worker_error for residuals in by_rank], axis=0, dtype=float)
        return own, np.concatenate([residuals.owner_error["0"] for residuals in by_rank])


@pytest.mark.parametrize("new", [1, 3, 5])
@pytest.mark.parametrize("old", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        (name, steps)
        for name, algorithm in ALGORITHMS.items()
        for steps in ((4, 6) if isinstance(algorithm, LocalUpdates) else (4,))
    ],
)
def test_what_the_ranks_have_together_is_kept(name, old, new, steps, tmp_path):
    """In the midst of a block, and at the end of one, where there are blocks."""
    algorithm = ALGORITHMS[name]

    def save(comm: Communicator) -> Learner:
        learner = learner_of(algorithm, comm)
        for step in range(steps):
            train(learner, step)
        checkpoints = psgd.Checkpoints(tmp_path)
        checkpoints.save(learner, extra=comm.rank)
        checkpoints.wait()
        return learner

    def load(comm: Communicator) -> tuple[Learner, psgd.training.LoadedCheckpoint]:
        learner = learner_of(algorithm, comm)
        learner.parameters.flat[:] = np.nan
        return learner, psgd.load_checkpoint(learner, tmp_path)

    before = Ranks.of(simulate(old, save))
    loaded = simulate(new, load)
    after = Ranks.of([learner for learner, _ in loaded])
    assert all(saved.extras == list(range(old)) and saved.ranks == old for _, saved in loaded)
    alike = 0 if old == 1 else None  # what all who wrote it had
    assert [saved.extra for _, saved in loaded] == (
        list(range(old)) if old == new else [alike] * new
    )
    assert after.sent == before.sent
    assert set(after.samples) == set(before.samples)
    by_blocks = isinstance(algorithm, LocalUpdates)
    if not by_blocks:
        assert after.weights == [1] * new
    for now, then in ((after.models, before.models), (after.m, before.m)):
        np.testing.assert_allclose(after.mean(now), before.mean(then), rtol=1e-5, atol=1e-6)
        if old != new:
            assert all(np.array_equal(now[0], vector) for vector in now)
        if all(np.array_equal(then[0], vector) for vector in then):
            assert np.array_equal(now[0], then[0]), "equal ones have changed"
    assert max(after.steps) == max(before.steps)
    if before.state[0].exchange.residuals:
        for now, then in zip(after.residuals(), before.residuals(), strict=True):
            np.testing.assert_allclose(now, then, rtol=1e-5, atol=1e-5)
    if by_blocks:
        (then,), (now,) = (
            {state.fragments["0"].samples for state in run.state} for run in (before, after)
        )
        own = sum(state.fragments["0"].own_samples for state in after.state)
        assert then == now == own
        assert all(np.array_equal(s.start, before.state[0].start) for s in after.state)

    def go_on(comm: Communicator) -> np.ndarray:
        learner, _ = load(comm)
        for step in range(steps, steps + 6):
            train(learner, step)
        learner.finish()
        return learner.parameters.flat

    models = simulate(new, go_on)
    assert np.isfinite(models[0]).all()
    if name != "warm start":
        assert all(np.array_equal(models[0], model) for model in models)


def test_data_parallel_goes_on_as_on_the_old_ranks(tmp_path):
    """32 bits, the same minibatches: to rounding, the number of ranks does not matter."""

    def run(comm: Communicator, first: int, last: int, load: bool) -> np.ndarray:
        model = psgd.models.MLP([6, 5, 4], seed=0)
        learner = Learner(model.parameters, psgd.Adam(lr=0.01), psgd.DataParallelSGD(), comm)
        data = np.random.default_rng(0)
        x, y = data.standard_normal((40, 6)), data.integers(0, 4, 40)
        source = psgd.data.Source(x, y, minibatch_size=7, epochs=3, seed=1)
        checkpoints = psgd.Checkpoints(tmp_path)
        if load:
            psgd.load_checkpoint(learner, tmp_path)
        for x, y in source.minibatches(learner):
            model.gradient(x, y, out=learner.gradient)
            learner.step(samples=len(x))
            if learner.samples == last:
                checkpoints.save(learner)
                checkpoints.wait()
                break
        return learner.parameters.flat

    whole = simulate(3, lambda comm: run(comm, 0, 120, False))[0]
    simulate(3, lambda comm: run(comm, 0, 54, False))
    for path in tmp_path.iterdir():
        if path.name != "000000000054":
            path.rename(tmp_path / "unused")
    for size in (1, 2, 4):
        parts = simulate(size, lambda comm: run(comm, 54, 0, True))
        np.testing.assert_allclose(parts[0], whole, rtol=1e-4, atol=1e-6)


def test_a_field_that_does_not_say_what_it_means(tmp_path):
    @dataclass
    class Outsider:
        told: np.ndarray = across("same")
        untold: np.ndarray

    class Learning(Learner):
        def __init__(self, comm: Communicator) -> None:
            super().__init__(zeros("two values"), psgd.SGD(lr=1), psgd.DataParallelSGD(), comm)
            self.state = Outsider(np.ones(2), np.ones(2))

    def save(comm: Communicator) -> None:
        psgd.Checkpoints(tmp_path).save(Learning(comm), background=False)

    simulate(2, save)
    simulate(2, lambda comm: psgd.load_checkpoint(Learning(comm), tmp_path))
    with pytest.raises(UserError, match=r"algorithm.untold does not declare its meaning"):
        simulate(3, lambda comm: psgd.load_checkpoint(Learning(comm), tmp_path))


def test_paths(tmp_path: Path) -> None:
    """A run's folder means the checkpoints in it."""

    def save(comm: Communicator) -> None:
        psgd.Checkpoints(tmp_path / "checkpoints").save(
            learner_of(ALGORITHMS["1 bit"], comm), background=False
        )

    simulate(1, save)
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "000000000000"):
        learner = learner_of(ALGORITHMS["1 bit"], Communicator.single())
        assert psgd.load_checkpoint(learner, path).path.name == "000000000000"


@pytest.mark.parametrize("new", [1, 2, 3])
def test_bits_that_were_chosen_go_with_the_residuals(new, tmp_path, monkeypatch):
    """Also where these ranks would have chosen others, for which there are no residuals."""
    algorithm = psgd.DataParallelSGD(gradient_bits="auto", block_size=64)

    def choose(bits: int) -> None:
        monkeypatch.setattr(exchange_choices, "choose_bits", lambda *_: ({"0": bits}, None))

    def save(comm: Communicator) -> Learner:
        learner = learner_of(algorithm, comm)
        for step in range(3):
            train(learner, step)
        psgd.Checkpoints(tmp_path).save(learner, background=False)
        return learner

    def load(comm: Communicator) -> Learner:
        learner = learner_of(algorithm, comm)
        psgd.load_checkpoint(learner, tmp_path)
        return learner

    choose(1)
    own, total = Ranks.of(simulate(2, save)).residuals()
    choose(32)
    learners = simulate(new, load)
    assert [learner.state.exchange.bits for learner in learners] == [{"0": 1}] * new
    after = Ranks.of(learners).residuals()
    assert np.allclose(after[0], own) and np.allclose(after[1], total)
    assert own.any() and total.any()


@pytest.mark.parametrize("new", [1, 2, 3])
def test_other_ranks_may_have_other_bits(new, tmp_path):
    """What signs have lost is sent in an entropy code."""

    def ranks(comm: Communicator, steps: int, **options: Any) -> Learner:
        learner = learner_of(psgd.DataParallelSGD(block_size=BLOCK_SIZE, **options), comm)
        if list(tmp_path.iterdir()):
            psgd.load_checkpoint(learner, tmp_path)
        for step in range(steps):
            train(learner, step)
        comm.barrier()
        psgd.Checkpoints(tmp_path).save(learner, background=False)
        return learner

    before = Ranks.of(simulate(2, lambda comm: ranks(comm, 3, **SIGNS))).residuals()
    for bits in (1, 0.25):
        learners = simulate(new, lambda comm, bits=bits: ranks(comm, 0, gradient_bits=bits))
        after = Ranks.of(learners).residuals()
        assert np.allclose(after[0], before[0], atol=1e-5) and np.array_equal(after[1], before[1])
        assert before[0].any() and before[1].any()
    models = [
        rank.parameters.flat for rank in simulate(new, lambda c: ranks(c, 3, gradient_bits=1))
    ]
    assert all(np.array_equal(models[0], model) for model in models)


def test_memory(tmp_path, monkeypatch):
    """Beside the learner: what it is to become, and pieces of what the ranks had."""
    monkeypatch.setattr(reshard, "PIECE", 1 << 12)
    n = 300_000

    def learner_with(comm: Communicator) -> Learner:
        parameters = psgd.Parameters({"w": np.zeros(n, np.float32)})
        return Learner(parameters, psgd.SGD(lr=0.1), psgd.ModelAveragingSGD(sync_steps=9), comm)

    def save(comm: Communicator) -> None:
        learner = learner_with(comm)
        learner.gradient.flat[:] = comm.rank
        learner.step(samples=1 + comm.rank)
        psgd.Checkpoints(tmp_path).save(learner, background=False)

    simulate(4, save)
    learner = learner_with(Communicator.single())
    tracemalloc.start()
    try:
        psgd.load_checkpoint(learner, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    copies = peak / learner.parameters.flat.nbytes
    assert copies < 3.2, "two are its state, and one the buffer of a new exchange"
    mean = sum((1 + rank) * 0.1 * rank / (1 + rank) for rank in range(4)) / 10
    np.testing.assert_allclose(learner.parameters.flat, -mean, rtol=1e-6)
