"""Outer steps that do not wait for late ranks, in simulated time and in many orders."""

from __future__ import annotations

import numpy as np
import pytest
from explored_training import residual_of
from old_faults import OldFault

import parallel_sgd as psgd
from parallel_sgd import runtime
from parallel_sgd.algorithms import ExchangeState, LocalUpdates, local_updates
from parallel_sgd.algorithms.rounds import Coordinator
from parallel_sgd.testing import Outcome, ScheduleFailed, explore

RANKS, STEPS, SIZE, BLOCK, RATE = 4, 24, 8, 4, 1 / 64
SCALE = 1 / RANKS  #: of a rank with its share of the samples, in a mean
X = np.round(8 * np.random.default_rng(0).standard_normal((STEPS * SIZE, 40)))


def training(algorithm, seconds=lambda rank, step: 0.1, meets=(), dtype="float64", optimizer=None):
    """A program that trains on whole numbers, whatever the model is: samples add their own.

    Args:
        seconds: of a rank for a step, by their numbers.
        meets: numbers of the steps after which the ranks compare their models.
    """

    def program(comm):
        parameters = psgd.Parameters({"w": np.zeros(40, dtype)})
        rule = optimizer or psgd.SGD(lr_per_sample=RATE)
        with psgd.Learner(parameters, rule, algorithm, comm) as learner:
            source = psgd.data.Source(
                X, np.zeros(len(X)), minibatch_size=SIZE, dtype=dtype, shuffle=False
            )
            at = [runtime.monotonic()]
            for step, (inputs, _) in enumerate(source.minibatches(learner), 1):
                runtime.sleep(seconds(comm.rank, step))
                learner.gradient.flat[...] = inputs.sum(0)
                learner.step(samples=len(inputs))
                at.append(runtime.monotonic())
                if step in meets:
                    with learner.evaluation():
                        compare(learner)
            learner.finish()
            compare(learner)
            report = learner.report()["outer_steps"]
            return parameters.flat.copy(), np.subtract(at, at[0]), report, residual_of(learner)

    return program


def compare(learner):
    """Compare what all ranks must have in common when they meet."""
    flat, state = learner.parameters.flat, learner.state
    momentum = b"" if state.momentum is None else state.momentum.tobytes()
    (fragment,) = state.parts
    common = flat.tobytes(), momentum, fragment.blocks, fragment.samples, fragment.steps
    assert learner.comm.size == RANKS
    everywhere = learner.comm.allgather_object(common)
    assert len(set(everywhere)) == 1, "ranks that meet differ"
    own = learner.comm.allgather_object(fragment.own_samples)
    assert sum(own) == fragment.samples


def outcome_of(program, schedules=1, check=lambda results: None):
    """The results of all ranks, in the last of so many schedules without faults."""
    results = []

    def checked(outcome: Outcome) -> None:
        assert not outcome.error
        results[:] = outcome.results
        check(results)

    explore(program, check=checked, ranks=RANKS, schedules=schedules, faults=0, seed=1)
    return results


def changes(rank):
    """What a rank's samples change, block by block: [blocks, n]."""
    of_steps = X.reshape(STEPS, RANKS, SIZE // RANKS, -1).sum(2)[:, rank]
    return RATE * of_steps.reshape(-1, BLOCK, X.shape[1]).sum(1)


def hangs_once(seconds):
    """Rank 3 hangs in its ninth step, the first of its third block."""
    return lambda rank, step: seconds if (rank, step) == (3, 9) else 0.1


def test_a_hung_rank_holds_up_no_block():
    """Three ranks take the outer steps of blocks 3 to 6 alone. Rank 3's third change is of a model
    that lacks these four; its later ones take an outer step each, while the others wait for it."""
    algorithm = psgd.ModelAveragingSGD(sync_steps=BLOCK, quorum=3, grace_s=0.05)
    results = outcome_of(training(algorithm, hangs_once(10)))
    weights = np.ones((RANKS, STEPS // BLOCK))
    weights[3, 2] = 1 / (1 + 4)
    terms = np.stack([changes(rank) for rank in range(RANKS)])
    expected = -SCALE * (weights[..., None] * terms).sum((0, 1))
    for rank, (flat, at, report, _) in enumerate(results):
        assert np.allclose(flat, expected)
        late = {"late": 1, "oldest": 4} if rank == 3 else {"late": 0, "oldest": 0}
        assert report == {"taken": 6 if rank == 3 else 10} | late
        assert at[-1] == pytest.approx(12.3 if rank == 3 else 2.4, abs=0.5)


def test_a_quorum_waits_for_some_seconds():
    """A rank that comes within these is not late."""
    for seconds, late in ((0.9, 0), (1.6, 1)):
        algorithm = psgd.DiLoCo(sync_steps=BLOCK, grace_s=1)  # of a majority: 3 of 4
        results = outcome_of(training(algorithm, hangs_once(seconds)))
        assert [report["late"] for _, _, report, _ in results] == [0, 0, 0, late]


@pytest.mark.parametrize("bits", [32, 1])
def test_nothing_is_lost(monkeypatch, bits):
    """Without weights of age, what ranks have learned is in the model or in a residual, once."""
    monkeypatch.setattr(local_updates, "weight_after", lambda age: 1)
    block_size = {"block_size": 16} if bits == 1 else {}
    algorithm = psgd.ModelAveragingSGD(sync_steps=BLOCK, quorum=3, gradient_bits=bits, **block_size)
    expected, late = -SCALE * X.sum(0) * RATE, 0

    def check(results):
        nonlocal late
        flat = results[0][0].astype(np.float64)
        residuals = [residual for _, _, _, residual in results if residual is not None]
        assert np.allclose(flat - sum(residuals, np.zeros(40)), expected, atol=1e-4)
        late += sum(report["late"] for _, _, report, _ in results)

    dtype = "float64" if bits == 32 else "float32"
    outcome_of(training(algorithm, lambda rank, step: 0, (6, 8, 15), dtype), 25, check)
    assert late > 25


ALGORITHMS = {
    "BMUF": psgd.BlockMomentumSGD(sync_steps=BLOCK, quorum=3),
    "bits by the clock": psgd.DiLoCo(sync_steps=3, quorum=3, gradient_bits={0: 8, 100: 4}),
    "a rate by the clock": psgd.SlowMo(sync_steps=5, quorum=3, grace_s=0.01),
    "SparseLoCo": psgd.SparseLoCo(block_samples=30, quorum=4, block_size=16),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_that_meet_are_equal(name):
    """In every order, after some steps, and at the end."""
    rates = {40 * block: (0.01, 0.001)[block % 2] for block in range(5)}
    rule = psgd.MomentumSGD(lr=psgd.schedules.Steps(rates))
    random = np.random.default_rng(2).exponential(0.1, (RANKS, STEPS + 1))
    program = training(
        ALGORITHMS[name], lambda *at: random[at], (1, 4, 10, 11, 23), "float32", rule
    )
    outcome_of(program, 10)


def wrong(owner, name, now, then):
    return OldFault("", owner, name, now, then)


MUTANTS = {
    "residuals of owners are dropped": (
        wrong(ExchangeState, "sum_over", "residuals.give_owned(self.current.owned)", "pass"),
        lambda patch: test_nothing_is_lost(patch, 1),
    ),
    "changes do not age": (
        wrong(LocalUpdates, "_round", "weight_after(age)", "1.0"),
        lambda patch: test_a_hung_rank_holds_up_no_block(),
    ),
    "a late rank keeps its momentum": (
        wrong(local_updates, "_common", "[state.start, state.momentum]", "[state.start]"),
        lambda patch: test_ranks_that_meet_are_equal("BMUF"),
    ),
    "a late rank has its own bits": (
        wrong(LocalUpdates, "_round", ", clock=max(clocks)", ""),
        lambda patch: test_ranks_that_meet_are_equal("bits by the clock"),
    ),
    "a late rank has its own rate": (
        wrong(
            LocalUpdates, "_round", "max(blocks), max(facts)", "max(blocks), (0, 0, 0, state.lr)"
        ),
        lambda patch: test_ranks_that_meet_are_equal("a rate by the clock"),
    ),
    "a rank that waits loses its change": (
        wrong(LocalUpdates, "_round", "x += state.start", "x[...] = state.start"),
        lambda patch: test_nothing_is_lost(patch, 32),
    ),
    "a rank that meets the others loses its change": (
        wrong(LocalUpdates, "arrive", "x += state.start", "x[...] = state.start"),
        lambda patch: test_nothing_is_lost(patch, 32),
    ),
    "a quorum is one less": (
        wrong(Coordinator, "_answer", "< self._quorum", "< self._quorum - 1"),
        lambda patch: test_a_hung_rank_holds_up_no_block(),
    ),
    "nobody waits for the others": (
        wrong(Coordinator, "_answer", "< self._grace_s", "< 0"),
        lambda patch: test_a_quorum_waits_for_some_seconds(),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_die(monkeypatch, mutant):
    fault, shown_by = MUTANTS[mutant]
    fault.put_back(monkeypatch)
    with pytest.raises((AssertionError, ScheduleFailed)):
        shown_by(monkeypatch)
