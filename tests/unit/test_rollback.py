"""Ranks die at every moment of training, and the others go on: as threads."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failures import Failure, FailurePlan

import parallel_sgd as psgd
from parallel_sgd.communication import Communicator, simulate_recovery
from parallel_sgd.data import with_next

N, MINIBATCH, EPOCHS = 23, 6, 3
TOTAL = N * EPOCHS
RANKS = 4


def train(
    algorithm: Any,
    optimizer: Any,
    dtype: str = "float32",
    *,
    ahead: bool = False,
    folder: Path | None = None,
) -> Callable[..., Any]:
    """What every rank does: pull the model towards the samples, each its part of them.

    Args:
        ahead: whether the next minibatch is there before a step is taken with this one.
        folder: of a checkpoint to go on from, if there is one; else it is written.
    """
    random = np.random.default_rng(0)
    x, y = random.standard_normal((N, 300)), np.arange(N) % 2

    def body(comm: Communicator) -> Any:
        seeds = comm.allgather_object(10 + comm.rank)  # what a rank that joins must know, too
        assert len(seeds) == RANKS and seeds[comm.rank] == 10 + comm.rank
        comm.broadcast(x_of_first := np.full(3, comm.rank))
        assert not x_of_first.any()
        parameters = psgd.Parameters({"W": np.zeros((20, 10), dtype), "b": np.zeros(100, dtype)})
        source = psgd.data.Source(x, y, minibatch_size=MINIBATCH, epochs=EPOCHS, dtype=dtype)
        with psgd.Learner(parameters, optimizer, algorithm, comm, commit_every=3) as learner:
            new = folder is not None and psgd.resume(learner, folder) is None
            minibatches = source.minibatches(learner)
            if ahead:
                minibatches = (minibatch for minibatch, _ in with_next(minibatches))
            trained = 0
            for inputs, _ in minibatches:
                learner.gradient.flat[...] = (parameters.flat - inputs).sum(0)
                if algorithm.overlap and len(inputs):
                    learner.ready("b")
                trained += learner.step(samples=len(inputs))
                if new and folder is not None and learner.samples == 2 * MINIBATCH:
                    psgd.Checkpoints(folder).save(learner, background=False)
            learner.finish()
            lost = (learner.report() or {})["recovery"] | {"trained": trained}
            return parameters.flat.copy(), learner.samples, lost, comm.size

    return body


def undisturbed(body: Callable[..., Any]) -> Any:
    results = simulate_recovery(RANKS, body, timeout_s=100)
    assert [size for _, _, _, size in results] == [RANKS] * RANKS
    return results[0][0]


def after_a_kill(
    body: Callable[..., Any],
    rank: int,
    number: int,
    spares: int,
    heard_by: int | None = None,
    *,
    at_end: bool = False,
) -> list[Any] | None:
    """Return the results of the remaining ranks, or None if the rank has finished first.

    Args:
        at_end: other ranks may have finished before the failure.
    """
    with FailurePlan(Failure(rank, meeting=number, heard_by=heard_by)) as plan:
        results = simulate_recovery(RANKS, body, spares=spares, timeout_s=100)
    assert (results[rank] is None) == plan.struck
    left = [result for result in results if result is not None]
    assert len(left) >= RANKS - 1
    for flat, samples, lost, size in left:
        assert samples == TOTAL
        if heard_by is None and not at_end:  # else other ranks may have finished before
            assert size == len(left) and lost["ranks_lost"] == [rank] * plan.struck
        assert lost["samples_trained_again"] <= 4 * MINIBATCH
        assert np.array_equal(flat, left[0][0]), "replicas differ"
    return left if plan.struck else None


@pytest.mark.parametrize(("spares", "ahead"), [(0, False), (1, False), (0, True)])
def test_full_precision_trains_on_every_sample_once(spares: int, ahead: bool) -> None:
    """With one less to rounding, and where another takes the place bit for bit, all is as if
    nobody had died."""
    body = train(psgd.DataParallelSGD(), psgd.MomentumSGD(lr=0.01), "float64", ahead=ahead)
    expected, grown = undisturbed(body), 0
    for number in range(8, 200, 7):
        left = after_a_kill(body, number % RANKS, number, spares)
        if left is None:
            break
        flat, _, _, size = left[0]
        grown += size == RANKS
        assert np.allclose(flat, expected, rtol=1e-12, atol=1e-13)
        assert size < RANKS or np.array_equal(flat, expected)
    assert number > 60 and (grown > 5) == bool(spares)


@pytest.mark.parametrize("number", range(42, 54, 3))
@pytest.mark.parametrize("later", [4, 16, 17, 24])
def test_samples_trained_again_are_counted_once(number: int, later: int) -> None:
    """Also if a second rank fails within the recovery from the first failure."""
    body = train(psgd.DataParallelSGD(), psgd.MomentumSGD(lr=0.01), "float64")
    with FailurePlan(
        Failure(1, meeting=number), Failure(2, meeting=number + later, heard_by=3)
    ) as plan:
        results = simulate_recovery(RANKS, body, timeout_s=100)
    assert plan.struck
    left = [lost for _, _, lost, _ in filter(None, results)]
    assert len(left) == RANKS - 2
    trained = max(lost["trained"] for lost in left)
    assert {lost["samples_trained_again"] for lost in left} == {trained - TOTAL}


def test_collectives_of_recoverable_ranks_take_arguments_by_name() -> None:
    def body(comm: Communicator) -> list[float]:
        array, gathered = np.full(2, 1.0 + comm.rank), np.zeros(4)
        comm.allgather(array, receive=gathered, counts=[2, 2])
        comm.broadcast(array=array)
        return [*array, *gathered]

    assert simulate_recovery(2, body, spares=1, timeout_s=20)[:2] == [[1, 1, 1, 1, 2, 2]] * 2


def test_a_rank_that_joins_takes_up_no_checkpoint(tmp_path) -> None:
    """Those whose training it joins have begun with one."""
    body = train(psgd.DataParallelSGD(), psgd.MomentumSGD(lr=0.01), "float64", folder=tmp_path)
    expected = undisturbed(body)
    assert np.array_equal(undisturbed(body), expected)
    for number in (75, 90):
        left = after_a_kill(body, 1, number, spares=1)
        assert left and len(left) == RANKS and np.array_equal(left[0][0], expected)


@pytest.mark.parametrize("spares", [0, 1])
def test_some_come_through_a_meeting_in_which_a_rank_dies(spares: int) -> None:
    """Wherever that is, also where others have done what comes next."""
    body = train(psgd.DataParallelSGD(), psgd.MomentumSGD(lr=0.01), "float64")
    expected = undisturbed(body)
    for number in range(8 + spares, 200, 5):  # tests/exploration meets all
        rank = number // 2 % RANKS
        heard_by = (rank + 1 + number // RANKS % 3) % RANKS
        left = after_a_kill(body, rank, number, spares, heard_by)
        if left is None:
            break
        assert np.allclose(left[0][0], expected, rtol=1e-12, atol=1e-13)
    assert number > 60


def held(residuals: Any, owned: Any) -> Any:
    """What a rank still has to send, of all values."""
    total = residuals["worker_error"].astype(np.float64)
    for name, error in residuals["owner_error"].items():
        total[owned[name]] += error
    return total


@pytest.mark.parametrize("code", ["entropy", "sign"])
def test_what_the_dead_rank_held_is_lost_and_no_more(code: str) -> None:
    """applied + residuals of those that are left == all gradients - what the dead one held."""
    random = np.random.default_rng(0)
    x, rate = random.standard_normal((N, 300)).astype(np.float32), 1e-3
    learners: dict[int, Any] = {}
    algorithm = psgd.DataParallelSGD(gradient_bits=1, code=code, block_size=64)

    def body(comm: Communicator) -> Any:
        parameters = psgd.Parameters({"W": np.zeros((20, 15), np.float32)})
        source = psgd.data.Source(x, np.zeros(N, int), minibatch_size=MINIBATCH, epochs=EPOCHS)
        optimizer = psgd.SGD(lr_per_sample=rate)
        learner = psgd.Learner(parameters, optimizer, algorithm, comm, commit_every=3)
        learners[comm.world_ranks[comm.rank]] = learner
        for inputs, _ in source.minibatches(learner):
            learner.gradient.flat[...] = inputs.sum(0)
            learner.step(samples=len(inputs))
        learner.finish()
        exchange = learner.state.exchange
        state = {
            "worker_error": exchange.residuals.worker_error,
            "owner_error": exchange.residuals.owner_error,
        }
        return parameters.flat.copy(), held(state, exchange.current.owned)

    for number in (60, 73, 85):
        with FailurePlan(Failure(1, meeting=number)) as plan:
            results = simulate_recovery(RANKS, body, timeout_s=100)
        assert plan.struck
        left = [result for result in results if result is not None]
        applied = -left[0][0].astype(np.float64) / rate
        missing = EPOCHS * x.sum(0, dtype=np.float64) - applied - sum(rest for _, rest in left)
        dead = learners[1]
        owned = dead.state.exchange.current.owned
        prefix = "algorithm.exchange.residuals."
        could = [
            held(
                {
                    "worker_error": copy.arrays[prefix + "worker_error"],
                    "owner_error": {k: copy.arrays[f"{prefix}owner_error.{k}"] for k in owned},
                },
                owned,
            )
            for copy in dead.recovery._snapshots
        ]
        assert np.abs(missing).max() > 0.1
        assert any(np.allclose(missing, lost, atol=1e-3) for lost in could)


LOSSY = [
    psgd.DataParallelSGD(gradient_bits=2),  # with fewer, much of 300 values waits in residuals
    psgd.DataParallelSGD(gradient_bits=2, code="entropy", transport="pipelined"),
    psgd.DataParallelSGD(gradient_bits=4, overlap=True),
    psgd.DataParallelSGD(gradient_bits=8, double_buffering=True),
    psgd.PowerSGD(rank=2),
    psgd.ModelAveragingSGD(sync_steps=2),
    psgd.BlockMomentumSGD(sync_steps=3),
    psgd.SlowMo(sync_steps=2),
    psgd.BlockMomentumSGD(sync_steps=4, overlap_samples=6, gradient_bits=8),
]


@pytest.mark.parametrize("spares", [0, 1, 2])
def test_others_die_while_the_ranks_recover(spares: int) -> None:
    """Also while the others tell a rank that joins what they know, and no other one joins then."""
    body = train(psgd.DataParallelSGD(gradient_bits=4), psgd.SGD(lr=0.01))
    for later in (*range(1, 15, 3 if spares == 1 else 7), *range(15, 60, 7)):
        with FailurePlan(Failure(1, meeting=60), Failure(2, meeting=60 + later)) as plan:
            results = simulate_recovery(RANKS, body, spares=spares, timeout_s=100)
        assert plan.struck == 2
        left = [result for result in results if result is not None]
        assert len(left) == RANKS - 2 + spares
        for flat, samples, lost, size in left:
            assert size == len(left) and samples == TOTAL and lost["ranks_lost"] == [1, 2]
            assert np.array_equal(flat, left[0][0])


@pytest.mark.parametrize("algorithm", LOSSY, ids=lambda a: type(a).__name__)
def test_every_algorithm_goes_on(algorithm: Any) -> None:
    """Of residuals those of the dead rank are lost: 300 values, and as many of the one stripe."""
    body = train(algorithm, psgd.SGD(lr=0.01))
    expected = undisturbed(body)
    # With overlap the latter are of its close, which others come through.
    for number in (40, 47, 56) if algorithm.overlap else (61, 65, 71, 80, 86):
        rank = number % RANKS
        left = after_a_kill(body, rank, number, number % 2)
        if left is not None:
            assert np.linalg.norm(left[0][0] - expected) < 0.7 * np.linalg.norm(expected)
            values = {lost["residual_values_lost"] for _, _, lost, _ in left}
            if isinstance(algorithm, psgd.DataParallelSGD) and algorithm.gradient_bits == 2:
                assert values == {300 + 300 * (rank == 0)}
            assert len(values) == 1


def test_a_rank_dies_as_the_others_close() -> None:
    """Where an exchange could be under way: they have all that they need."""
    algorithm = psgd.DataParallelSGD(gradient_bits=4, overlap=True)
    body = train(algorithm, psgd.SGD(lr=0.01))
    for number in range(50, 90, 3):
        if after_a_kill(body, number % RANKS, number, 0, at_end=True) is None:
            break
    assert number > 60


@pytest.mark.parametrize("kind", [psgd.DataParallelSGD, partial(psgd.SlowMo, sync_steps=3)])
def test_residuals_of_those_that_are_left_are_not_lost(kind: Any) -> None:
    """Also where a copy follows another without a meeting, as a pass over the data ends."""
    random = np.random.default_rng(0)
    x, rate = random.standard_normal((N, 300)).astype(np.float32), 1e-3
    algorithm = kind(gradient_bits=1, code="entropy", block_size=64)

    def body(comm: Communicator) -> Any:
        parameters = psgd.Parameters({"W": np.zeros((20, 15), np.float32)})
        optimizer = psgd.SGD(lr_per_sample=rate)
        with psgd.Learner(parameters, optimizer, algorithm, comm, commit_every=1) as learner:
            for _ in range(EPOCHS):
                source = psgd.data.Source(x, np.zeros(N, int), minibatch_size=MINIBATCH, epochs=1)
                for inputs, _ in source.minibatches(learner):
                    learner.gradient.flat[...] = inputs.sum(0)
                    learner.step(samples=len(inputs))
            learner.finish()
            return parameters.flat.copy(), (learner.report() or {})["recovery"]

    for number in range(5, 200, 7):
        rank = number % RANKS
        failure = Failure(rank, meeting=number, heard_by=(rank + 1) % RANKS)
        with FailurePlan(failure) as plan:
            results = simulate_recovery(RANKS, body, timeout_s=100)
        left = [result for result in results if result is not None]
        if not plan.struck:
            break
        for flat, lost in left:
            assert np.array_equal(flat, left[0][0])
            if len(lost["ranks"]) == RANKS - 1:  # else some had come to their end
                assert lost["residual_values_lost"] <= 600, number  # of one rank alone
    assert number > 60


def test_others_die_as_some_have_come_further_in_the_recovery() -> None:
    body = train(psgd.DataParallelSGD(), psgd.MomentumSGD(lr=0.01), "float64")
    expected, twice = undisturbed(body), 0
    for number in range(40, 70, 7):
        for later in range(1, 24, 3):
            with FailurePlan(
                Failure(1, meeting=number, heard_by=2),
                Failure(3, meeting=number + later, heard_by=0),
            ) as plan:
                results = simulate_recovery(RANKS, body, timeout_s=100)
            left = [result for result in results if result is not None]
            assert len(left) == RANKS - plan.struck
            twice += plan.struck == 2
            for flat, samples, *_ in left:
                assert samples == TOTAL
                assert np.allclose(flat, expected, rtol=1e-12, atol=1e-13)
    assert twice > 20


def test_a_block_that_is_shorter_than_a_minibatch_of_those_that_are_left() -> None:
    """Each minibatch is a block then."""
    algorithm = psgd.ModelAveragingSGD(sync_period=-(-MINIBATCH // RANKS))
    body = train(algorithm, psgd.SGD(lr=0.01))
    for number in (40, 60):
        left = after_a_kill(body, 1, number, 0)
        assert left and len(left) == RANKS - 1


def session(folder: Path) -> Callable[..., Any]:
    """A run with all that a session does between two minibatches."""
    random = np.random.default_rng(0)
    x = random.standard_normal((120, 6)).astype(np.float32)
    data = psgd.data.Arrays(x, (x[:, :3] + 0.1 * x[:, 3:]).argmax(1))

    def body(comm: Communicator) -> Any:
        model = psgd.models.MLP([6, 8, 3], seed=1, dtype=np.float64)
        algorithm = psgd.DataParallelSGD()
        with psgd.Learner(
            model.parameters, psgd.MomentumSGD(lr=0.05), algorithm, comm, commit_every=2
        ) as learner:
            rows = psgd.TrainingSession(
                learner=learner,
                objective=model,
                train=data,
                minibatch_size=12,
                epochs=4,
                progress_every=60,
                validation=psgd.CrossValidation(data=data, every=120, restore_best=True),
                auto_learning_rate=psgd.AutoLearningRate(load_best_model=True),
                checkpoints=psgd.CheckpointConfig(folder=folder / "checkpoints", every=84),
                folder=psgd.RunFolder(folder / "run"),
            ).run()
        return model.parameters.flat.copy(), [row.samples for row in rows], comm.size

    return body


@pytest.mark.parametrize(("spares", "partly"), [(0, False), (1, False), (0, True)])
def test_a_session_goes_on(tmp_path: Path, spares: int, partly: bool) -> None:
    body = session(tmp_path / "undisturbed")
    expected, samples, _ = simulate_recovery(3, body, timeout_s=100)[0]
    assert samples == [60, 120, 180, 240, 300, 360, 420, 480]
    for number in range(40, 700, 71 if partly else 107):
        rank, folder = number % 3, tmp_path / str(number)
        heard_by = (rank + 1) % 3 if partly else None
        with FailurePlan(Failure(rank, meeting=number, heard_by=heard_by)) as plan:
            results = simulate_recovery(3, session(folder), spares=spares, timeout_s=100)
        left = [result for result in results if result is not None]
        assert len(left) >= 2 and (results[rank] is None) == plan.struck
        for flat, rows, size in left:
            assert rows == samples and size == len(left)
            assert np.allclose(flat, expected, rtol=1e-12, atol=1e-13)
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["samples"] for line in lines] == samples
        if not plan.struck:
            break
    assert number > 300


SAMPLES, SIZE = 120, 12


def ended(folder: Path, algorithm: Any, *, resume: bool = False) -> Callable[..., Any]:
    """A run whose best model comes long before its end, with which it ends; its validation falls
    into the midst of blocks."""
    random = np.random.default_rng(0)
    x = random.standard_normal((SAMPLES, 6)).astype(np.float32)
    data = psgd.data.Arrays(x, (x[:, :3] + 0.1 * x[:, 3:]).argmax(1))
    rates = psgd.schedules.Steps({0: 0.3, SAMPLES: 50.0})

    def body(comm: Communicator, epochs: int = 3) -> Any:
        model, steps = psgd.models.MLP([6, 8, 3], seed=1, dtype=np.float64), 0
        backward = model.gradient

        def counted(*arguments: Any, **given: Any) -> Any:
            nonlocal steps
            steps += 1
            return backward(*arguments, **given)

        model.gradient = counted
        with psgd.Learner(
            model.parameters, psgd.SGD(lr=rates), algorithm, comm, commit_every=2
        ) as learner:
            rows = psgd.TrainingSession(
                learner=learner,
                objective=model,
                train=data,
                minibatch_size=SIZE,
                epochs=epochs,
                validation=psgd.CrossValidation(data=data, every=5 * SIZE, restore_best=True),
                checkpoints=psgd.CheckpointConfig(
                    folder=folder / "checkpoints", every=84, resume=resume
                ),
                folder=psgd.RunFolder(folder / f"run-{epochs}", plot=False),
            ).run()
        return model.parameters.flat.copy(), rows, steps

    return body


@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize(
    "algorithm",
    [psgd.DataParallelSGD(), psgd.ModelAveragingSGD(sync_steps=4)],
    ids=lambda a: type(a).__name__,
)
def test_a_run_ends_with_its_best_model(tmp_path: Path, algorithm: Any, partly: bool) -> None:
    """Where a rank dies as it goes back to that, saves it, or measures it: nobody trains on."""
    expected, rows, steps = simulate_recovery(3, ended(tmp_path, algorithm), timeout_s=100)[0]
    best = rows[-1].event
    assert best.startswith("restored the model of ") and steps == 3 * SAMPLES // SIZE
    for number in range(60, 500, 49 if partly else 58):
        rank, folder = number % 3, tmp_path / str(number)
        heard_by = (rank + 1) % 3 if partly else None
        with FailurePlan(Failure(rank, meeting=number, heard_by=heard_by)) as plan:
            results = simulate_recovery(3, ended(folder, algorithm), timeout_s=100)
        left = [result for result in results if result is not None]
        assert len(left) == 3 - plan.struck
        for flat, others, taken in left:
            assert np.array_equal(flat, left[0][0]), number
            assert [row.samples for row in others] == [row.samples for row in rows], number
            assert taken <= steps + 12, number  # the latest minibatches again, or a block
            if isinstance(algorithm, psgd.DataParallelSGD):
                assert np.allclose(flat, expected, rtol=1e-12, atol=1e-13), number
        if not plan.struck:
            break
    assert number > 150


def test_a_rank_dies_soon_after_a_run_was_resumed(tmp_path: Path) -> None:
    """What the run had come to is not forgotten: its rows, its best model."""
    algorithm = psgd.DataParallelSGD()
    expected, rows, _ = simulate_recovery(3, ended(tmp_path, algorithm), timeout_s=100)[0]
    killed = 0
    for number in range(12, 70, 10):
        folder = tmp_path / str(number)
        body = ended(folder, algorithm, resume=True)
        simulate_recovery(3, partial(body, epochs=2), timeout_s=100)
        with FailurePlan(Failure(number % 3, meeting=number)) as plan:
            results = simulate_recovery(3, body, timeout_s=100)
        killed += plan.struck
        for flat, others, _ in filter(None, results):
            assert [row.samples for row in others] == [row.samples for row in rows], number
            assert np.allclose(flat, expected, rtol=1e-12, atol=1e-13), number
        lines = (folder / "run-3" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["samples"] for line in lines] == [row.samples for row in rows]
    assert killed > 5
