"""Tables in mode "sync": one update of a row in every step, of the sum of what all have pushed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from parallel_sgd import (
    SGD,
    Adagrad,
    Adam,
    Communicator,
    DataParallelASGD,
    Embedding,
    Learner,
    Parameters,
    UserError,
    load_checkpoint,
)
from parallel_sgd.embedding import RowTable
from parallel_sgd.errors import SharedError
from parallel_sgd.schedules import Schedule, Steps
from parallel_sgd.training import Checkpoints

WIDTH, STEPS = 3, 6
FIRST, LAST = -(2**63), 2**63 - 1
SHARED = np.array([-1, 0, FIRST, LAST, 10**11, -7])  #: ids that several workers push to

Array = np.ndarray


def learner_on(comm: Communicator, *tables: Embedding, servers: int, **options: Any) -> Learner:
    parameters = Parameters({"W": np.ones((2, 3), np.float32)})
    options = {"sync_steps": 1, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        algorithm = DataParallelASGD(mode="sync", servers=servers, tables=tables, **options)
        return Learner(parameters, SGD(lr=0.1), algorithm, comm)


def server_counts(comm: Communicator) -> set[int]:
    """One on every rank; and as many apart as there can be with two workers."""
    return {0, max(0, comm.size - 2)}


def samples_of(worker: int, step: int) -> int:
    """Uneven, and sometimes none, but not of the first."""
    return (3, 0, 2, 1)[(worker + step) % 4] or int(worker == 0)


def pushed_by(worker: int, step: int) -> tuple[Array, Array]:
    """Ids, of which some are this worker's alone and some occur twice, and their gradients."""
    random = np.random.default_rng([worker, step])
    own = random.integers(-50, 50, 4) * 10**9 + worker
    ids = np.concatenate([random.choice(SHARED, 5), own, own[:1]]).reshape(2, 5)
    return ids, random.standard_normal((2, 5, WIDTH)).astype(np.float32)


def summed(parts: Iterator[tuple[Array, Array]]) -> tuple[Array, Array]:
    """The different ids and their sums, of each part by itself and then in the parts' order."""
    total: dict[int, Array] = {}
    for ids, gradient in parts:
        own: dict[int, Array] = {}
        for i, row in zip(ids.reshape(-1).tolist(), gradient.reshape(-1, WIDTH), strict=True):
            own[i] = own.get(i, np.zeros(WIDTH, np.float32)) + row
        for i, row in own.items():
            total[i] = total.get(i, np.zeros(WIDTH, np.float32)) + row
    return np.array([*total], np.int64), np.array([*total.values()], np.float32)


def serial_step(table: RowTable, workers: int, steps: list[int], factor: float = 1.0) -> None:
    """The whole minibatch of all workers as one, where a table is trained alone."""
    counts = {(k, t): samples_of(k, t) for k in range(workers) for t in steps}
    ids, gradient = summed(pushed_by(k, t) for (k, t), m in counts.items() if m)
    table.push(ids, gradient, sum(counts.values()), factor)


def step_of(learner: Learner, step: int) -> None:
    """A minibatch of this worker."""
    m = samples_of(learner.comm.rank, step)
    if m:
        ids, gradient = pushed_by(learner.comm.rank, step)
        learner.tables["t"].push(ids, gradient, samples=m)
        learner.gradient.flat[:] = 1 + learner.comm.rank
    learner.step(samples=m)


def rows_of(table: RowTable, ids: Array) -> Array:
    out = np.empty((ids.size, table.options.width), np.float32)
    table.pull(ids.reshape(-1), out)
    return out.reshape(*ids.shape, -1)


@pytest.mark.parametrize(
    ("optimizer", "prefetch"),
    [(SGD(lr=Steps({0: 0.5, 12: 0.2})), True), (Adagrad(lr=0.1), False), (Adam(lr=0.01), True)],
)
def test_training_is_that_of_one_table_with_the_whole_minibatch(comm, optimizer, prefetch):
    """Bit for bit, for ids of all of int64; rows that are pulled are those of the step before."""
    options = Embedding(name="t", width=WIDTH, optimizer=optimizer, entry_count=2, seed=5)
    for servers in server_counts(comm):
        learner, alone = learner_on(comm, options, servers=servers), RowTable(options)
        if not learner.serves:
            k, table = learner.comm.rank, learner.tables["t"]
            assert learner.comm.size == comm.size - servers
            for step in range(STEPS):
                ids, _ = pushed_by(k, step)
                assert table.rows(ids).tobytes() == rows_of(alone, ids).tobytes(), step
                if prefetch:
                    table.prefetch(pushed_by(k, step + 1)[0])
                step_of(learner, step)
                serial_step(alone, learner.comm.size, [step])
            every = np.concatenate([pushed_by(k, t)[0].reshape(-1) for t in range(STEPS)])
            assert table.rows(every).tobytes() == rows_of(alone, every).tobytes()
            assert table.counts()["rows"] == len(alone) > 0
        learner.finish()


@pytest.mark.threads(3)
@pytest.mark.parametrize(
    "options",
    [
        {"sync_steps": 2},
        {"sync_steps": 2, "currency": "deltas"},
        {"sync_steps": 2, "pipeline": True},
        {"sync_steps": 2, "ramp_minibatches": 3},
    ],
)
def test_rows_are_trained_once_in_every_push_of_the_model(comm, options):
    embedding = Embedding(name="t", width=WIDTH, optimizer=Adagrad(lr=0.1))
    learner, alone = learner_on(comm, embedding, servers=0, **options), RowTable(embedding)
    table = learner.tables["t"]
    for step in range(0, STEPS, 2):
        for part in (step, step + 1):
            table.prefetch(SHARED)
            step_of(learner, part)
            if part == step:
                assert table.rows(SHARED).tobytes() == rows_of(alone, SHARED).tobytes()
        pushes = [(k, t) for k in range(comm.size) for t in (step, step + 1) if samples_of(k, t)]
        parts = [pushed_by(k, t) for k, t in pushes]
        samples = sum(samples_of(k, t) for k, t in pushes)
        trained = sum(1 for t in range(step + 1) if samples_of(comm.rank, t))
        factor = learner.algorithm.ramp_up.factor(trained)
        factor = max(comm.allgather_object(factor))
        alone.push(*summed(iter(parts)), samples, factor)
        assert np.allclose(table.rows(SHARED), rows_of(alone, SHARED), rtol=1e-5, atol=1e-7)
    learner.finish()


def test_each_worker_counts_in_full_where_the_merge_is_a_sum(comm):
    embedding = Embedding(name="t", width=WIDTH, optimizer=SGD(lr=0.5), initial_scale=0)
    learner = learner_on(comm, embedding, servers=0, merge="sum")
    ids, m = np.array([-1]), 1 + comm.rank
    learner.tables["t"].push(ids, np.full((1, WIDTH), float(m), np.float32), samples=m)
    learner.gradient.flat[:] = m
    learner.step(samples=m)
    assert learner.tables["t"].rows(ids) == pytest.approx(-0.5 * comm.size)
    learner.finish()


def test_a_run_goes_on_bit_for_bit_from_the_midst_of_a_period(comm, tmp_path):
    """With what has been pushed and not been applied, also on other servers and workers."""
    folder = comm.allgather_object(str(tmp_path))[0]
    options = Embedding(name="t", width=WIDTH, optimizer=Adam(lr=0.01))

    def trained(learner: Learner, first: int, last: int) -> None:
        for step in range(first, last):
            step_of(learner, step)

    whole = learner_on(comm, options, servers=0, sync_steps=2)
    trained(whole, 0, 3)
    Checkpoints(folder).save(whole, background=False)
    trained(whole, 3, 8)
    rows, x = whole.tables["t"].rows(SHARED), whole.parameters.flat.copy()
    whole.finish()
    again = learner_on(comm, options, servers=0, sync_steps=2)
    step_of(again, 0)  # forgotten, as what was prefetched is
    again.tables["t"].prefetch(SHARED)
    load_checkpoint(again, folder)
    trained(again, 3, 8)
    assert again.tables["t"].rows(SHARED).tobytes() == rows.tobytes()
    assert again.parameters.flat.tobytes() == x.tobytes()
    again.finish()
    for servers in server_counts(comm) - {0}:
        fewer = learner_on(comm, options, servers=servers, sync_steps=2)
        if not fewer.serves:
            load_checkpoint(fewer, folder)
            alone = RowTable(options)
            serial_step(alone, comm.size, [0, 1])
            before = fewer.tables["t"].rows(SHARED)
            assert np.allclose(before, rows_of(alone, SHARED), rtol=1e-5, atol=1e-7)
            fewer.gradient.flat[:] = 0
            fewer.step(samples=2)  # which ends the period
            counts = {k: samples_of(k, 2) for k in range(comm.size)}
            ids, gradient = summed(pushed_by(k, 2) for k, m in counts.items() if m)
            alone.push(ids, gradient, sum(counts.values()) + 2 * fewer.comm.size)
            after = fewer.tables["t"].rows(SHARED)
            assert np.allclose(after, rows_of(alone, SHARED), rtol=1e-4, atol=1e-6)
            assert not np.array_equal(after, before)
        fewer.finish()


def test_a_worker_that_fails_ends_the_step_of_all(comm):
    learner = learner_on(comm, Embedding(name="t", width=WIDTH), servers=0)
    step_of(learner, 0)
    learner.tables["t"].push(*pushed_by(comm.rank, 1), samples=1)
    comm.barrier()  # else others hear of it in their pushes
    failing = comm.rank == comm.size - 1
    with pytest.raises(SharedError, match=f"^bad data .on rank {comm.size - 1}"):
        learner.fail("bad data") if failing else learner.step(samples=1)


@dataclass(frozen=True)
class Falls(Schedule):
    """A learning rate that is wrong later on."""

    def __call__(self, samples: int) -> float:
        return -1.0 if samples else 0.1


def test_a_table_that_cannot_be_trained_ends_training_on_all(comm):
    """On a server, in whose answers to the others they learn of it."""
    table = Embedding(name="t", width=WIDTH, optimizer=SGD(lr=Falls()))
    learner = learner_on(comm, table, servers=min(1, comm.size - 1))
    problem = r"cannot train its tables: .*-1"
    if learner.serves:
        with pytest.raises(SharedError, match=problem):
            learner.finish()
        return
    for step in range(2):
        learner.tables["t"].push(*pushed_by(learner.comm.rank, step), samples=1)
        if step == 0:
            learner.step(samples=1)
    with pytest.raises(SharedError, match=problem):
        learner.step(samples=1)


def test_any_int64_is_an_id_and_others_are_refused(comm):
    """Pushed as they come, too."""
    options = Embedding(name="t", width=1, optimizer=SGD(lr=1.0), seed=2)
    algorithm = DataParallelASGD(servers=min(1, comm.size - 1), sync_steps=1, tables=(options,))
    learner = Learner(Parameters({"b": np.zeros(2, np.float32)}), SGD(lr=1.0), algorithm, comm)
    if not learner.serves:
        table, alone = learner.tables["t"], RowTable(options)
        begin = rows_of(alone, SHARED)
        assert len(np.unique(begin)) == len(SHARED)
        learner.comm.barrier()
        table.push(SHARED, np.ones((len(SHARED), 1), np.float32), samples=1)
        learner.comm.barrier()
        assert np.allclose(table.rows(SHARED), begin - learner.comm.size)
        assert table.counts()["rows"] == len(SHARED)
        with pytest.raises(UserError, match=r"int64, not an array of uint64 \(ids\.view\(np\.int"):
            table.rows(SHARED.view(np.uint64))
    learner.finish()
