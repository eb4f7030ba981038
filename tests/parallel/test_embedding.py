"""Embedding tables over MPI and over threads: rows are what one dictionary of rows would hold."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from parallel_sgd import (
    SGD,
    Adagrad,
    Adam,
    DataParallelASGD,
    DataParallelSGD,
    Embedding,
    Learner,
    Parameters,
    UserError,
    load_checkpoint,
    simulate,
)
from parallel_sgd.embedding import RowTable
from parallel_sgd.training import Checkpoints, checkpoints_in

pytestmark = pytest.mark.messages

WIDTH = 5
SPACE = 10**11


def learner_on(comm, *tables, servers=None, **options):
    parameters = Parameters({"W": np.arange(6, dtype=np.float32).reshape(2, 3)})
    if servers is None:
        servers = min(1, comm.size - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        algorithm = DataParallelASGD(servers=servers, sync_steps=1, tables=tables, **options)
        return Learner(parameters, SGD(lr=0.1), algorithm, comm)


def server_counts(comm):
    """Some on ranks of their own, and one on every rank."""
    return range(max(1, comm.size - 1)) if comm.size < 4 else (1, 3, 0)


@pytest.mark.parametrize("optimizer", [SGD(lr=0.5), Adagrad(lr=0.1), Adam(lr=0.01)])
def test_rows_are_those_of_one_table(on_ranks, optimizer):
    """Workers push one after the other; a table in this process is pushed the same."""
    table = Embedding(name="t", width=WIDTH, optimizer=optimizer, seed=3)

    def body(comm, servers):
        learner = learner_on(comm, table, servers=servers)
        if not learner.serves:
            workers = learner.comm
            remote, known = learner.tables["t"], RowTable(table)
            random = np.random.default_rng(7)
            for step in range(4 * workers.size):
                ids = random.integers(0, SPACE, (3, 4))
                ids[0, 1] = ids[2, 3] = ids[1, 1]
                ids[1, 2] = step % 3
                gradient = random.standard_normal((3, 4, WIDTH)).astype(np.float32)
                if step % workers.size == workers.rank:
                    remote.push(ids, gradient, samples=2)
                distinct, inverse = np.unique(ids.reshape(-1), return_inverse=True)
                summed = np.zeros((len(distinct), WIDTH), np.float32)
                np.add.at(summed, inverse.reshape(-1), gradient.reshape(-1, WIDTH))
                known.push(distinct, summed, 2)
                workers.barrier()
                pulled = remote.rows(ids)
                expected = np.empty((ids.size, WIDTH), np.float32)
                known.pull(ids.reshape(-1), expected)
                assert np.allclose(pulled.reshape(-1, WIDTH), expected, rtol=1e-5, atol=1e-6)
                workers.barrier()
            assert remote.counts()["rows"] == len(known)
        learner.finish()
        return learner.serves

    def on_all(comm):
        for servers in server_counts(comm):
            serves = comm.allgather_object(body(comm, servers))
            assert sum(serves) == (servers if comm.size > 1 else 0)
        return comm.size

    assert len(on_ranks(on_all)) in (1, 2, 3, 4)


def test_prefetched_rows_are_those_of_before(comm):
    learner = learner_on(comm, Embedding(name="t", width=2, optimizer=SGD(lr=1.0)))
    if not learner.serves:
        rows, ids = learner.tables["t"], np.array([10 * comm.rank + 5, 10 * comm.rank + 6])
        before = rows.rows(ids)
        rows.prefetch(ids)
        rows.push(ids, np.ones((2, 2), np.float32), samples=1)
        assert np.array_equal(rows.rows(ids), before)
        assert np.allclose(rows.rows(ids), before - 1)
        rows.prefetch(ids)  # and then others are asked for
        assert np.array_equal(rows.rows(ids[:1]), (before - 1)[:1])
    learner.finish()


def test_rows_have_the_ramp_of_their_minibatch(comm):
    """Which counts a worker's minibatches with samples."""
    table = Embedding(name="t", width=2, optimizer=SGD(lr=1.0))
    learner = learner_on(comm, table, ramp_minibatches=1, ramp_coefficient=0.25)
    if not learner.serves:
        rows, ids = learner.tables["t"], np.array([comm.rank])
        expected = rows.rows(ids).copy()
        for factor in (0.25, 0.5, 0.0, 0.75, 1.0):
            if factor:
                rows.push(ids, np.ones((1, 2), np.float32), samples=1)
            learner.announce(int(factor > 0), 1)
            learner.step(samples=int(factor > 0))
            expected -= factor
            assert np.allclose(rows.rows(ids), expected)
    learner.finish()


def test_checkpoints_hold_rows_on_any_number_of_servers(comm, tmp_path):
    table = Embedding(name="t", width=WIDTH, optimizer=Adagrad(lr=0.1), entry_count=2)
    folder = comm.allgather_object(str(tmp_path))[0]
    ids = np.arange(40) * 97
    gradient = np.random.default_rng(5).standard_normal((40, WIDTH)).astype(np.float32)
    learner = learner_on(comm, table, servers=max(0, comm.size - 1))
    path, checkpoints = None, Checkpoints(folder)
    trained = x = saved = None
    if not learner.serves:
        rows = learner.tables["t"]
        for _ in range(2):
            rows.push(ids[:30], gradient[:30], samples=1)
        rows.push(ids, gradient, samples=1)
        learner.gradient.flat[:] = 1 + comm.rank
        learner.step(1)
        checkpoints.save(learner)
        saved = rows.rows(ids)
        rows.push(ids, gradient, samples=1)  # not in it any more
        path = checkpoints.wait()
        trained, x = rows.rows(ids), learner.parameters.flat.copy()
    learner.finish()
    path, trained, saved, x = comm.allgather_object((path, trained, saved, x))[0]
    for servers in range(comm.size):
        learner = learner_on(comm, table, servers=servers)
        if not learner.serves and learner.comm.size == 1:
            rows = learner.tables["t"]
            rows.prefetch(ids)  # of the table that goes
            load_checkpoint(learner, path)
            assert np.array_equal(rows.rows(ids), saved)
            assert np.array_equal(learner.parameters.flat, x)
            assert rows.counts()["rows"] == 30
            assert rows.counts()["pending"] == 10
            rows.push(ids, gradient, samples=1)
            assert np.array_equal(rows.rows(ids), trained)
        learner.finish()


def saves_slowly(comm, folder, servers, disk):
    """A learner that has trained, and still writes its checkpoint."""

    def late(right, *arguments):
        time.sleep(0.2)
        return right(*arguments)

    comm.barrier()
    disk["write_rank"] = late
    comm.barrier()
    learner = learner_on(comm, Embedding(name="t", width=WIDTH), servers=servers)
    checkpoints = Checkpoints(folder)
    if not learner.serves:
        learner.tables["t"].push(np.array([7, 9]), np.ones((2, WIDTH), np.float32), samples=1)
        learner.gradient.flat[:] = 1
        learner.step(1)
        checkpoints.save(learner)
    return learner, checkpoints


def test_a_checkpoint_may_be_saved_just_before_the_end(comm, tmp_path, disk):
    """Servers stay until it is written."""
    folder = Path(comm.allgather_object(str(tmp_path))[0])
    for servers in {0, min(1, comm.size - 1)}:
        path = folder / str(servers)
        learner, checkpoints = saves_slowly(comm, path, servers, disk)
        learner.finish()
        saved = checkpoints.wait()
        assert learner.serves or list(saved.glob("tables-*.safetensors"))
        comm.barrier()


def test_a_checkpoint_is_written_though_the_rank_has_ended(tmp_path, disk):
    """By its server, which is stopped behind it; then the rank has left, where others need it."""

    def body(comm):
        _, checkpoints = saves_slowly(comm, tmp_path, 0, disk)
        if comm.rank == 1:
            checkpoints.wait()
            comm.barrier()

    with pytest.raises(UserError, match="waits in sum_integers for rank 0, which has finished"):
        simulate(2, body, timeout_s=10)
    (path,) = checkpoints_in(tmp_path)
    assert len([*path.glob("tables-*.safetensors")]) == 2


def test_bad_ids_and_gradients_are_refused_and_the_server_goes_on(comm):
    learner = learner_on(comm, Embedding(name="t", width=3))
    rows = learner.tables["t"]
    ids = np.array([1, 2])
    if learner.serves:
        with pytest.raises(UserError, match="only serves"):
            rows.rows(ids)
    else:
        good = np.ones((2, 3), np.float32)
        for wrong, problem in (
            (np.array([1.0, 2.0]), "int64, not an array of float64"),
            (np.array([1, 2], np.int32), "int64, not an array of int32"),
            ([1, 2], "int64, not list"),
        ):
            with pytest.raises(UserError, match=problem):
                rows.rows(wrong)
            with pytest.raises(UserError, match=problem):
                rows.push(wrong, good, samples=1)
        for gradient in (np.ones((2, 4), np.float32), np.ones((3, 3), np.float32), np.ones(6)):
            with pytest.raises(UserError, match=r"must be float32\[2, 3\]"):
                rows.push(ids, gradient, samples=1)
        with pytest.raises(UserError, match="'t' is not finite"):
            rows.push(ids, good * np.nan, samples=1)
        assert rows.counts()["rows"] == 0
        learner.comm.barrier()
        rows.push(ids, good, samples=1)
        assert rows.counts()["rows"] == 2
    learner.finish()


def test_of_several_servers_none_takes_what_one_would_refuse(comm):
    table = Embedding(name="t", width=3)
    learner = learner_on(comm, table, servers=max(0, comm.size - 1))
    if not learner.serves:
        rows, ids = learner.tables["t"], np.arange(50)
        gradient = np.ones((50, 3), np.float32)
        gradient[7, 1] = np.inf
        with pytest.raises(UserError, match=r"'t' is not finite$"):
            rows.push(ids, gradient, samples=1)
        with pytest.raises(UserError, match=r"^samples=\d+ must be a whole number from 1 to "):
            rows.push(ids, np.ones((50, 3), np.float32), samples=2**70)
        assert rows.counts()["rows"] == 0
        assert rows.rows(ids[:0]).shape == (0, 3)
    learner.finish()


def test_rows_that_are_not_finite_are_left_out_with_their_minibatch(comm):
    learner = learner_on(comm, Embedding(name="t", width=3))
    learner.skipped.skips = True
    if not learner.serves:
        rows, ids = learner.tables["t"], np.array([4, 5])
        for number in range(3):
            gradient = np.ones((2, 3), np.float32)
            gradient[1, 1] = np.nan if number == 1 else 1
            rows.push(ids, gradient, samples=1)
            learner.gradient.flat[:] = 0
            learner.step(1)
        assert learner.report()["skipped"]["latest"] == (
            "the gradient of rows of table 't' is not finite"
        )
        assert np.isfinite(rows.rows(ids)).all()
    learner.finish()
    if not learner.serves:
        pushes = [worker["pushes"] for worker in learner.report()["workers"]]
        assert pushes == [2] * learner.comm.size


def test_tables_that_are_not_there(comm):
    learner = learner_on(comm, Embedding(name="t", width=3))
    for name, shown in (("no such", "'no such'"), (7, "7")):
        with pytest.raises(UserError, match=rf"^tables\[{shown}\] is not known; there are 't'"):
            learner.tables[name]
    assert learner.tables.get("no such") is None
    assert "no such" not in learner.tables
    learner.finish()
    alone = Learner(Parameters({"b": np.zeros(2)}), SGD(lr=1.0), DataParallelSGD(), comm)
    with pytest.raises(UserError, match=r"^tables\['t'\] is not known; there are none \(Data"):
        alone.tables["t"]
