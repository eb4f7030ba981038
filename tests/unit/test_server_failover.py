"""Workers and servers die at every moment of training, and the others go on: as threads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from failures import Failure, FailurePlan, SimulatedFailure, replaced

import parallel_sgd as psgd
from parallel_sgd.communication import Communicator, Mailbox, simulate_recovery

RANKS, STEPS, BASE = 4, 12, 100


SHAPES = {"W": (20, 10), "b": (100,)}


def adding(algorithm: Any, shapes: Any = SHAPES) -> Callable[[Communicator], Any]:
    """In every step the worker on rank k adds BASE^k to every value."""

    def body(comm: Communicator) -> Any:
        parameters = psgd.Parameters({name: np.zeros(shape) for name, shape in shapes.items()})
        rank = comm.world_ranks[comm.rank]
        with psgd.Learner(parameters, psgd.SGD(lr=1.0), algorithm, comm) as learner:
            assert psgd.resume(learner, "none") is None  # of all ranks, and not where one joins
            taken = 0
            while not learner.serves and taken < STEPS:
                learner.gradient.flat[...] = -(BASE**rank)
                taken += learner.step(1) > 0
            learner.finish()
            report = learner.report() or {}
            return parameters.flat.copy(), report["recovery"], rank if taken else -1

    return body


def after_a_kill(
    body: Callable[..., Any],
    rank: int,
    number: int,
    ranks: int = RANKS,
    **given: Any,
) -> list[Any] | None:
    """What those that are left have; None where the program was at its end before."""
    with FailurePlan(Failure(rank, message=number)) as plan:
        results = simulate_recovery(ranks, body, timeout_s=30, **given)
    left = [result for result in results if result is not None]
    assert len(left) >= ranks - 1
    for flat, lost, *_ in left:
        assert lost["ranks_lost"] == [rank] * plan.struck
        assert np.array_equal(flat, left[0][0]), "replicas differ"
    return left if plan.struck else None


def exact(left: list[Any]) -> np.ndarray:
    """Which values have every push of every worker that is left once."""
    digits = [left[0][0] // BASE**rank % BASE for *_, rank in left if rank >= 0]
    return np.all([digit == STEPS for digit in digits], axis=0)


MODES = {
    "async": psgd.DataParallelASGD(servers=1, sync_steps=1),
    "two servers": psgd.DataParallelASGD(servers=2, sync_steps=1, min_block=10),
    "bounded": psgd.DataParallelASGD(
        servers=2, sync_steps=1, mode="bounded", staleness=1, min_block=10
    ),
    "updates": psgd.DataParallelASGD(servers=2, sync_steps=2, currency="deltas", min_block=10),
    "geo": psgd.DataParallelASGD(
        servers=1, sync_steps=3, mode="geo", currency="deltas", merge="sum"
    ),
    "pipeline": psgd.DataParallelASGD(servers=1, sync_steps=1, pipeline=True),
    "every rank serves": psgd.DataParallelASGD(servers=0, sync_steps=1, min_block=10),
}


@pytest.mark.filterwarnings("ignore:servers=0")
@pytest.mark.parametrize("name", MODES)
def test_a_worker_dies(name: str) -> None:
    """Every push of those that are left is applied once."""
    algorithm, killed = MODES[name], 0
    workers = RANKS - (algorithm.roles.servers or 0)
    for number in range(2, 200, 13):
        left = after_a_kill(adding(algorithm), number % workers, number)
        if left is None:
            break
        flat, lost, _ = left[0]
        if lost["server_values_lost"]:
            assert exact(left).sum() >= flat.size - lost["server_values_lost"]
        else:
            assert exact(left).all(), (number, flat)
        killed += 1
    assert killed >= 4


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("name", ["async", "two servers", "updates", "pipeline"])
def test_a_server_dies(name: str, spares: int) -> None:
    """What the others hold keeps every push; where none is left, every rank serves a part."""
    algorithm, killed, grown = MODES[name], 0, 0
    for number in range(5, 300, 23):
        left = after_a_kill(adding(algorithm), RANKS - 1, number, spares=spares)
        if left is None:
            break
        flat, lost, _ = left[0]
        assert exact(left).sum() >= flat.size - lost["server_values_lost"]
        grown += len(left) == RANKS
        killed += 1
    assert killed >= 4 and (grown >= 3) == bool(spares)


def test_a_round_is_of_those_that_are_left() -> None:
    algorithm = psgd.DataParallelASGD(servers=1, sync_steps=1, mode="sync")
    for number in range(2, 60, 7):
        left = after_a_kill(adding(algorithm), number % 3, number)
        assert left is None or len(left) == RANKS - 1


def test_a_server_dies_in_a_round() -> None:
    """Also as some workers have had their answers: each round is in the model once."""
    algorithm = psgd.DataParallelASGD(servers=2, sync_steps=1, mode="sync", min_block=10)
    killed = 0
    for number in range(80, 170, 3):
        left = after_a_kill(adding(algorithm), 2 + number % 2, number)
        if left is None:
            break
        workers = [rank for *_, rank in left if rank >= 0]  # of two, but where it began with less
        expected = STEPS * sum(BASE**rank for rank in workers) / len(workers)
        assert np.all(left[0][0] == expected), (number, left[0][0])
        killed += 1
    assert killed > 6


def test_a_server_dies_beside_one_that_holds_nothing() -> None:
    """A round of that one is of the same pushes as everybody's: of those who were in the midst of
    one, and of those who had not begun."""
    algorithm = psgd.DataParallelASGD(servers=4, sync_steps=1, mode="sync")  # and two slices
    killed = 0
    for number in range(50, 130, 3):
        left = after_a_kill(adding(algorithm), 2 + number % 4, number, ranks=6)
        if left is None:
            break
        assert np.all(left[0][0] == STEPS * (1 + BASE) / 2), (number, left[0][0])
        killed += 1
    assert killed > 6


def test_a_server_dies_in_a_step_that_ends_no_round() -> None:
    """As some workers have heard how many samples all have, and others take the step again."""
    algorithm = psgd.DataParallelASGD(servers=2, sync_steps=3, mode="sync", min_block=10)
    (whole, *_), *_ = simulate_recovery(5, adding(algorithm), timeout_s=30)
    killed = 0
    for number in range(40, 130, 3):
        left = after_a_kill(adding(algorithm), 3 + number % 2, number, ranks=5)
        if left is None:
            break
        assert np.array_equal(left[0][0], whole), number
        killed += 1
    assert killed > 6


ROUNDS = psgd.DataParallelASGD(servers=2, sync_steps=1, mode="sync", min_block=10)


def test_a_server_dies_as_one_worker_has_a_part_of_the_answer() -> None:
    """That part is not taken for what the worker has pulled: its round is made again, once."""
    taken, late, died, after = Counter[str](), threading.Event(), threading.Event(), 6

    def slow(take: Any, mailbox: Mailbox, key: Any) -> Any:
        """From the round after `after` on worker 1 does not hear of server 3; server 2 dies as
        worker 0 has its part."""
        sender, receiver, tag = key
        name, goes_on = threading.current_thread().name, mailbox.revoked or died.is_set()
        if name == "rank 2" and late.is_set() and not goes_on:
            raise SimulatedFailure
        if (sender, receiver) == (3, 1) and taken["rank 1"] == after and not goes_on:
            return None
        found = take(mailbox, key)
        if found is None or tag != 21 or found.size < 800:  # no model
            return found
        taken[name] += (sender, receiver) in ((3, 1), (2, 0))
        if name == "rank 0" and sender == 2 and taken[name] == after + 1:
            late.set()
            while not mailbox.revoked:
                time.sleep(1e-3)
            died.set()
        return found

    with replaced((Mailbox, "take", slow)):
        results = simulate_recovery(RANKS, adding(ROUNDS, {"W": (20, 10)}), timeout_s=30)
    assert died.is_set() and results[2] is None
    for flat, lost, _ in filter(None, results):
        assert lost["server_values_lost"] == 100
        assert np.all(flat == STEPS * (1 + BASE) / 2)


def test_another_server_dies_while_a_push_is_made_again() -> None:
    """What that one had of the first attempt is pushed again, too."""
    twice = 0
    for first in range(35, 51, 4):
        for later in range(14, 50, 8):
            ranks = (3, 4) if later % 16 == 6 else (4, 3)
            with FailurePlan(
                Failure(ranks[0], message=first), Failure(ranks[1], message=first + later)
            ) as plan:
                results = simulate_recovery(5, adding(ROUNDS, {"W": (20, 10)}), timeout_s=30)
            left = [result for result in results if result is not None]
            twice += plan.struck == 2
            expected = STEPS * sum(BASE**rank for *_, rank in left if rank >= 0) / 3
            assert np.all(left[0][0] == expected), (first, later, left[0][0])
    assert twice > 8


@pytest.mark.parametrize("pipeline", [False, True])
def test_residuals_are_kept_where_two_die_in_one_push(pipeline: bool) -> None:
    """What workers that are left have pushed and what their pushes have lost is all they had, but
    for what servers have lost."""
    algorithm = psgd.DataParallelASGD(
        servers=2, sync_steps=1, gradient_bits=8, min_block=10, pipeline=pipeline
    )

    def body(comm: Communicator) -> Any:
        parameters = psgd.Parameters({"W": np.zeros((20, 10), np.float32)})
        number = comm.world_ranks[comm.rank]
        random, given = np.random.default_rng(number), np.zeros(200, np.float64)
        with psgd.Learner(parameters, psgd.SGD(lr=1.0), algorithm, comm) as learner:
            taken = 0
            while not learner.serves and taken < STEPS:
                gradient = random.standard_normal(200) * (number != 0)
                learner.gradient.flat[...] = gradient
                if learner.step(1):
                    given, taken = given + gradient.astype(np.float32), taken + 1
            learner.finish()
            residual, lost = learner.state.residual, (learner.report() or {})["recovery"]
            pushed = np.zeros(200) if learner.serves or residual is None else given - residual
            return parameters.flat.copy(), lost, pushed

    for number in range(40, 80, 3):
        ranks = (3, 0) if number % 4 else (4, 3)
        with FailurePlan(
            Failure(ranks[0], message=number), Failure(ranks[1], message=number + number % 17)
        ):
            results = simulate_recovery(5, body, timeout_s=30)
        left = [result for result in results if result is not None]
        wrong = np.abs(left[0][0] + np.sum([pushed for *_, pushed in left], axis=0)) > 1e-3
        assert wrong.sum() <= left[0][1]["server_values_lost"], (number, wrong.sum())


@pytest.mark.parametrize(("bits", "spares"), [(8, 0), (1, 0), (1, 1)])
def test_a_push_of_few_bits_and_its_residual_are_kept(bits: int, spares: int) -> None:
    """What workers that are left have pushed and what their pushes have lost is all they had. All
    know what the dead one had, also a rank that joins."""
    algorithm = psgd.DataParallelASGD(servers=1, sync_steps=1, gradient_bits=bits)

    def body(comm: Communicator) -> Any:
        parameters = psgd.Parameters({"W": np.zeros((20, 10), np.float32)})
        number = comm.world_ranks[comm.rank]
        random, given = np.random.default_rng(number), np.zeros(200, np.float64)
        with psgd.Learner(parameters, psgd.SGD(lr=1.0), algorithm, comm) as learner:
            for _ in range(0 if learner.serves else STEPS):
                gradient = random.standard_normal(200)
                learner.gradient.flat[...] = gradient
                learner.step(1)
                given += gradient
            learner.finish()
            residual = learner.state.residual
            pushed = np.zeros(200) if residual is None else given - residual
            return parameters.flat.copy(), (learner.report() or {})["recovery"], pushed

    for number in range(40, 120, 11):
        rank = 2 + number % 2
        with FailurePlan(Failure(rank, message=number)) as plan:
            results = simulate_recovery(RANKS, body, spares=spares, timeout_s=30)
        left = [result for result in results if result is not None]
        if not plan.struck:
            break
        flat, lost, _ = left[0]
        assert {lost["residual_values_lost"] for _, lost, _ in left} == {200 * (rank == 2)}
        if rank == 3 and not lost["server_values_lost"]:
            pushed = np.sum([pushed for _, _, pushed in left], axis=0)
            assert np.allclose(flat, -pushed, atol=1e-4)
    assert number > 60


@pytest.mark.parametrize("number", range(4, 60, 3))
def test_a_rank_dies_in_the_warm_start_or_at_its_end(number: int) -> None:
    """With the steps that all have taken together the model is where it would be without; and every
    worker knows of each of them."""
    algorithm = psgd.DataParallelASGD(servers=1, sync_steps=1, distributed_after=4)

    def body(comm: Communicator) -> Any:
        parameters = psgd.Parameters({"W": np.zeros(200)})
        with psgd.Learner(parameters, psgd.SGD(lr=1.0), algorithm, comm) as learner:
            taken = 0
            while not learner.serves and learner.samples < 4:
                learner.gradient.flat[...] = -1
                taken += learner.step(1)
            learner.finish()
            return parameters.flat.copy(), (learner.report() or {})["recovery"], taken

    left = after_a_kill(body, number % RANKS, number)
    assert left is None or np.array_equal(left[0][0], np.full(200, 4.0))
    assert {taken for *_, taken in left or ()} <= {0, 4}  # servers take none


@pytest.mark.parametrize("later", range(1, 24, 3))
def test_another_dies_while_the_ranks_recover(later: int) -> None:
    """Within the first push of some, too; every push of those that are left is applied once."""
    algorithm = psgd.DataParallelASGD(servers=1, sync_steps=1)
    for number in (3, 6, 9, 30):
        with FailurePlan(Failure(0, message=number), Failure(1, message=number + later)) as plan:
            results = simulate_recovery(RANKS, adding(algorithm), timeout_s=30)
        assert plan.struck == 2
        left = [result for result in results if result is not None]
        assert len(left) == 2 and sorted(left[0][1]["ranks_lost"]) == [0, 1]
        assert exact(left).all(), left[0][0]
