"""Ranks die where workers with servers wait for each other beside training: in meetings, sessions,
checkpoints, and where all ask for rows. As threads."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failures import Failure, FailurePlan, SimulatedFailure, replaced

import parallel_sgd as psgd
from parallel_sgd.communication import Communicator, Mailbox, simulate_recovery
from parallel_sgd.errors import PeerFailure
from parallel_sgd.training.checkpoint.config import SharedClock
from parallel_sgd.training.consistency import ConsistencyCheck

RANKS, STEPS = 4, 12

X = np.random.default_rng(0).standard_normal((60, 4)).astype(np.float32)
DATA = psgd.data.Arrays(X, X[:, :3].argmax(1))


def rows_of_session(learner: psgd.Learner, model: Any, **options: Any) -> list[psgd.Progress]:
    """The rows of a session."""
    return psgd.TrainingSession(
        learner=learner, objective=model, train=DATA, minibatch_size=6, **options
    ).run()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_session_goes_on_after_a_death_in_an_evaluation(mode: str) -> None:
    """To which all workers have come: those that are left begin it anew."""
    others = threading.Semaphore(0)

    def body(comm: Communicator) -> Any:
        model = psgd.models.MLP([4, 3], seed=1)
        algorithm = psgd.DataParallelASGD(servers=1, sync_steps=1, mode=mode)
        evaluate, number = model.evaluate_sums, comm.world_ranks[comm.rank]

        def evaluated(*arguments: Any, **given: Any) -> Any:
            if learner.samples >= 120 and number == 1:
                assert all(others.acquire(timeout=20) for _ in range(2))
                raise SimulatedFailure
            if learner.samples >= 120:
                others.release()
            return evaluate(*arguments, **given)

        model.evaluate_sums = evaluated
        with psgd.Learner(model.parameters, psgd.SGD(lr=0.1), algorithm, comm) as learner:
            return rows_of_session(
                learner,
                model,
                epochs=4,
                validation=psgd.CrossValidation(data=DATA, patience=50),
            )

    results = simulate_recovery(RANKS, body, timeout_s=30)
    assert results[1] is None and results[0][-1].samples == 240
    assert [row.metrics for row in results[0]] == [row.metrics for row in results[2]]


@pytest.mark.parametrize("resumed", [False, True])
def test_the_last_row_is_of_a_worker_that_is_left(tmp_path, resumed: bool) -> None:
    """The first worker alone has had rows, and dies as all measure the final model."""

    def body(comm: Communicator) -> Any:
        model, number = psgd.models.MLP([4, 3], seed=1), comm.world_ranks[comm.rank]
        algorithm, evaluate = psgd.DataParallelASGD(servers=1, sync_steps=1), model.evaluate_sums

        def evaluated(*arguments: Any, **given: Any) -> Any:
            if number == 0 and dies:
                raise SimulatedFailure
            return evaluate(*arguments, **given)

        model.evaluate_sums = evaluated
        with psgd.Learner(model.parameters, psgd.SGD(lr=0.1), algorithm, comm) as learner:
            return rows_of_session(
                learner,
                model,
                epochs=2 if dies else 1,
                test=DATA,
                checkpoints=psgd.CheckpointConfig(folder=tmp_path / "saved", resume=True),
                folder=psgd.RunFolder(folder, plot=False),
            )

    dies, folder = False, tmp_path / "before"
    if resumed:
        simulate_recovery(RANKS, body, timeout_s=30)
    dies, folder = True, tmp_path / "run"
    results = simulate_recovery(RANKS, body, timeout_s=30)
    assert results[0] is None
    (row,) = (rows[-1] for rows in results if rows)
    assert row.samples == 120 and row.metrics["test_loss"] > 0
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["test_loss"] == row.metrics["test_loss"]


def test_a_rank_dies_as_all_ask_for_the_time(tmp_path: Path) -> None:
    """By which checkpoints are due: the others ask again, and train on."""
    asking, others = set[str](), threading.Semaphore(0)

    def asked(stepped: Any, clock: SharedClock) -> bool:
        asking.add(threading.current_thread().name)
        try:
            return stepped(clock)
        finally:
            asking.discard(threading.current_thread().name)

    def gathered(allgather: Any, comm: Communicator, item: Any) -> list[Any]:
        name = threading.current_thread().name
        if name in asking and name == "rank 1":
            assert all(others.acquire(timeout=20) for _ in range(2))
            raise SimulatedFailure
        if name in asking:
            others.release()
        return allgather(comm, item)

    def body(comm: Communicator) -> Any:
        model = psgd.models.MLP([4, 3], seed=1)
        algorithm = psgd.DataParallelASGD(servers=1, sync_steps=1, mode="sync")
        with psgd.Learner(model.parameters, psgd.SGD(lr=0.1), algorithm, comm) as learner:
            return rows_of_session(
                learner,
                model,
                epochs=2,
                checkpoints=psgd.CheckpointConfig(folder=tmp_path, every_s=1000),
            )

    with replaced((SharedClock, "stepped", asked), (Communicator, "allgather_object", gathered)):
        results = simulate_recovery(RANKS, body, timeout_s=30)
    assert results[1] is None
    assert [rows[-1].samples for rows in results if rows] == [120, 120]


@pytest.mark.parametrize(
    ("mode", "victim", "spares"), [("sync", 0, 0), ("sync", 3, 0), ("async", 1, 1), ("async", 2, 0)]
)
def test_a_rank_dies_anywhere_in_a_session(
    tmp_path: Path, mode: str, victim: int, spares: int
) -> None:
    """Also as it begins. Rows, callbacks, checkpoints and the model are those of the workers that
    are left."""

    def body(comm: Communicator) -> Any:
        model, called = psgd.models.MLP([4, 3], seed=1), Counter[int]()
        algorithm = psgd.DataParallelASGD(servers=2, sync_steps=1, mode=mode, min_block=1)
        with psgd.Learner(model.parameters, psgd.SGD(lr=0.1), algorithm, comm) as learner:
            rows = rows_of_session(
                learner,
                model,
                epochs=2,
                validation=psgd.CrossValidation(
                    data=DATA, every=30, patience=50, restore_best=mode == "sync"
                ),
                callbacks=[lambda row: called.update([row.samples])],
                checkpoints=psgd.CheckpointConfig(folder=folder / "checkpoints", every=30),
                folder=psgd.RunFolder(folder / "run", plot=False),
            )
            return learner.serves, rows, dict(called), model.parameters.flat.copy()

    killed = 0
    for number in range(20, 400, 47):
        folder = tmp_path / str(number)
        with FailurePlan(Failure(victim, message=number)) as plan:
            results = simulate_recovery(RANKS, body, timeout_s=30, spares=spares)
        if not plan.struck:
            break
        killed += 1
        trained = [result for result in filter(None, results) if not result[0]]
        for _, rows, called, flat in trained:
            assert called == {row.samples: 1 for row in rows}, number
            assert len(rows) == 4 and rows[-1].samples == 120, number
            assert np.array_equal(flat, trained[0][-1])
        assert psgd.Checkpoints(folder / "checkpoints").latest().name.startswith(f"{120:012d}")
        with np.load(folder / "run" / "model.npz") as saved:
            assert all(np.isfinite(saved[name]).all() for name in saved)
    assert killed > 5


def test_a_death_in_a_collective_of_ones_own_ends_a_session() -> None:
    """Nobody knows who has come through it. What tells so names the way to go on. (Who hears of the
    death before it comes to the collective goes on with those that are left.)"""
    others = threading.Semaphore(0)

    def body(comm: Communicator) -> Any:
        model, number = psgd.models.MLP([4, 3], seed=1), comm.world_ranks[comm.rank]
        algorithm, gradient = psgd.DataParallelASGD(servers=1, mode="sync"), model.gradient

        def together(*arguments: Any, **given: Any) -> Any:
            if learner.samples == 60 and number == 1:
                assert all(others.acquire(timeout=20) for _ in range(2))
                raise SimulatedFailure
            comm = learner.comm
            if learner.samples == 60:
                others.release()
            comm.barrier()
            return gradient(*arguments, **given)

        model.gradient = together
        with psgd.Learner(model.parameters, psgd.SGD(lr=0.1), algorithm, comm) as learner:
            return rows_of_session(learner, model, epochs=4)

    with pytest.raises(PeerFailure, match=r"learner\.between_steps, or restart"):
        simulate_recovery(RANKS, body, timeout_s=30)


def test_what_a_session_has_sent_is_counted_once() -> None:
    """Also where ranks have died, of those that are left."""

    def body(comm: Communicator) -> Any:
        parameters = psgd.Parameters({"W": np.zeros(200)})
        algorithm = psgd.DataParallelASGD(servers=1, sync_steps=1)
        with psgd.Learner(parameters, psgd.SGD(lr=1.0), algorithm, comm) as learner:
            taken = 0
            while not learner.serves and taken < STEPS:
                taken += learner.step(1) > 0
            learner.finish()
            return learner.bytes_sent, taken

    with FailurePlan(Failure(0, message=80)) as plan:
        results = simulate_recovery(RANKS, body, timeout_s=30)
    assert plan.struck
    for sent, taken in filter(None, results):
        assert 0 <= sent - taken * 3200 <= 2 * 3200  # pushes and answers; one was made again


def test_who_has_come_through_a_meeting_is_not_waited_for() -> None:
    """A rank dies in it: some workers are through it by then, and others hear of that."""
    algorithm = psgd.DataParallelASGD(servers=1, sync_steps=1)
    calls = Counter[int]()

    def body(comm: Communicator) -> Any:
        number = comm.world_ranks[comm.rank]
        parameters = psgd.Parameters({"W": np.zeros(200)})
        with psgd.Learner(parameters, psgd.SGD(lr=1.0), algorithm, comm) as learner:
            sums = []
            for _ in range(0 if learner.serves else 3):
                learner.step(1)
                calls[number] += 1
                sums.append(learner.surviving(lambda: learner.comm.sum_integers(np.ones(1, int))))
            learner.finish()
            return number, [int(total[0]) for total in sums]

    killed = 0
    for death in range(24, 60):  # when all have their learners
        with FailurePlan(Failure(2, meeting=death, heard_by=death % 2)) as plan:
            results = simulate_recovery(5, body, timeout_s=30)
        killed += plan.struck
        for number, sums in filter(None, results):
            assert len(sums) == (0 if number == 4 else 3), (death, results)
            assert sums == sorted(sums, reverse=True) and {*sums} <= {3, 4}
    assert killed > 3


def test_who_is_in_the_midst_of_its_data_goes_on_as_others_finish() -> None:
    """It does not wait for them, though what it was given is dealt out anew."""
    source = psgd.data.Source(DATA, minibatch_size=6)

    def body(comm: Communicator) -> Any:
        number, parameters = comm.world_ranks[comm.rank], psgd.Parameters({"W": np.zeros(200)})
        algorithm = psgd.DataParallelASGD(servers=1, sync_steps=1)
        with psgd.Learner(parameters, psgd.SGD(lr=1.0), algorithm, comm) as learner:
            for steps, (inputs, _) in enumerate(source.minibatches(learner)):
                learner.step(samples=len(inputs))
                if number == 1 and steps == 3:
                    died.wait(20)
            if number == 0:
                died.set()
                raise SimulatedFailure
            learner.finish()
            return number, learner.samples, learner.serves

    died = threading.Event()
    results = simulate_recovery(RANKS, body, timeout_s=20)
    assert results[0] is None
    assert all(serves or samples >= 60 for _, samples, serves in filter(None, results))


def test_checkpoints_and_rows_after_the_first_worker_has_died(tmp_path) -> None:
    """Another one has its duties: rows and checkpoints come to the end."""

    def body(comm: Communicator) -> Any:
        model = psgd.models.MLP([4, 3], seed=1)
        algorithm = psgd.DataParallelASGD(servers=1, sync_steps=1, mode="bounded", staleness=1)
        with psgd.Learner(model.parameters, psgd.SGD(lr=0.1), algorithm, comm) as learner:
            rows = rows_of_session(
                learner,
                model,
                epochs=4,
                checkpoints=psgd.CheckpointConfig(folder=folder / "checkpoints", every=120),
                folder=psgd.RunFolder(folder / "run"),
            )
            return learner.serves, learner.group.workers[0] == comm.rank, rows

    for step in (6, 16, 26, 36):
        folder = tmp_path / str(step)
        with FailurePlan(Failure(0, step=step)):
            results = simulate_recovery(RANKS, body, timeout_s=30)
        assert results[0] is None
        rows = [rows for serves, first, rows in filter(None, results) if first and not serves]
        assert len(rows) == 1 and rows[0][-1].samples == 240
        assert psgd.Checkpoints(folder / "checkpoints").latest().name == f"{240:012d}"


@pytest.mark.parametrize("number", range(1, 7))
def test_a_checkpoint_is_begun_anew_on_all_workers(tmp_path: Path, number: int) -> None:
    """A server dies as one worker has come through a meeting in it, and the other hears that a
    rank has died."""
    algorithm = psgd.DataParallelASGD(servers=2, sync_steps=1, min_block=10)
    come, dies, died = Counter[str](), threading.Event(), threading.Event()

    def met(meet: Any, check: ConsistencyCheck, comm: Communicator) -> None:
        meet(check, comm)
        name = threading.current_thread().name
        come[name] += 1
        if name == "rank 1" and come[name] == number:
            dies.set()
            assert died.wait(20)
            raise psgd.RanksLost("a rank has died")

    def taken(take: Any, mailbox: Mailbox, key: Any) -> Any:
        first_has_come = dies.is_set() and come["rank 0"] >= number
        if first_has_come and threading.current_thread().name == "rank 3":
            died.set()
            raise SimulatedFailure
        return take(mailbox, key)

    def body(comm: Communicator) -> bool:
        parameters = psgd.Parameters({"W": np.zeros(200)})
        with psgd.Learner(parameters, psgd.SGD(lr=1.0), algorithm, comm) as learner:
            with psgd.Checkpoints(tmp_path) as checkpoints:
                for _ in range(0 if learner.serves else 3):
                    learner.step(1)
                    checkpoints.save(learner)
            learner.finish()
            return learner.serves

    with replaced((ConsistencyCheck, "meet", met), (Mailbox, "take", taken)):
        results = simulate_recovery(RANKS, body, timeout_s=30)
    assert died.is_set() and results == [False, False, True, None]
    newest = psgd.Checkpoints(tmp_path).latest().name[:12]  # a death in the last one's writing
    assert int(newest) == 6 or (int(newest), number) == (4, 6)


def test_rows_that_are_asked_for_together_are_asked_for_again_together() -> None:
    """Whoever hears of a death in a request begins anew with the others, who wait elsewhere."""
    table = psgd.Embedding(name="words", width=2, optimizer=psgd.SGD(lr=1.0), initial_scale=0.0)
    algorithm = psgd.DataParallelASGD(servers=1, sync_steps=1, tables=(table,))

    def body(comm: Communicator) -> Any:
        parameters, sums = psgd.Parameters({"W": np.zeros(3)}), []
        with psgd.Learner(parameters, psgd.SGD(lr=1.0), algorithm, comm) as learner:

            def evaluated() -> int:
                learner.tables["words"].rows(np.arange(10))
                first = learner.comm.sum_integers(np.ones(1, int))
                learner.tables["words"].rows(np.arange(10))
                return int((first + 10 * learner.comm.sum_integers(np.ones(1, int)))[0])

            for _ in range(0 if learner.serves else 3):
                learner.step(1)
                sums.append(learner.between_steps(evaluated))
            learner.finish()
            return sums

    killed = 0
    for number in range(20, 120, 3):
        with FailurePlan(Failure(number % 3, message=number)) as plan:
            results = simulate_recovery(RANKS, body, timeout_s=30)
        killed += plan.struck
        for sums in filter(None, results):
            assert set(sums) <= {22, 33}, number
    assert killed > 8
