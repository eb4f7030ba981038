"""Arrays of the user's own on servers: added to and read by rows, or as a whole."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from cases import shared

from parallel_sgd import (
    SGD,
    Adagrad,
    Adam,
    ArrayTable,
    Communicator,
    DataParallelASGD,
    Learner,
    MomentumSGD,
    Parameters,
    UserError,
    load_checkpoint,
)
from parallel_sgd.training import Checkpoints

SHAPES = {"long": (2500,), "matrix": (7, 4), "tensor": (5, 2, 3), "one": (1,)}

Array = np.ndarray


def learner_on(comm: Communicator, servers: int, **options: Any) -> Learner:
    """With tables of all shapes, or those given."""
    tables = [ArrayTable(name=name, shape=shape) for name, shape in SHAPES.items()]
    given = {"sync_steps": 1, "tables": tables, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        algorithm = DataParallelASGD(servers=servers, **given)
        return Learner(Parameters({"b": np.zeros(2, np.float32)}), SGD(lr=0.1), algorithm, comm)


def server_counts(comm: Communicator) -> set[int]:
    return {0, max(0, comm.size - 2)}


def values_of(shape: tuple[int, ...], *seed: int, whole: bool = False) -> Array:
    random = np.random.default_rng(seed)
    values = random.integers(-99, 99, shape) if whole else random.standard_normal(shape)
    return values.astype(np.float32)


def test_what_all_workers_add_is_there(comm):
    """Exactly: the values are whole numbers."""
    for servers in server_counts(comm):
        learner = learner_on(comm, servers)
        workers = comm.size - servers
        for name, shape in {} if learner.serves else SHAPES.items():
            table, k = learner.tables[name], learner.comm.rank
            assert learner.comm.size == workers and table.shape == shape
            assert not table.get().any()
            learner.comm.barrier()
            table.add(values_of(shape, k, whole=True))
            expected = sum(values_of(shape, j, whole=True) for j in range(workers))
            if len(shape) > 1:
                rows = np.array([4, 0, 4], np.int32)
                some = values_of((3, *shape[1:]), 7, k, whole=True)
                table.add(some, rows)
                for j in range(workers):
                    np.add.at(expected, rows, values_of(some.shape, 7, j, whole=True))
            learner.comm.barrier()
            assert table.get().dtype == np.float32
            np.testing.assert_array_equal(table.get(), expected)
            if len(shape) > 1:
                np.testing.assert_array_equal(table.get([3, 3, 1]), expected[[3, 3, 1]])
                assert table.get(np.empty(0)).shape == (0, *shape[1:])
        learner.finish()


@pytest.mark.threads(3)
@pytest.mark.parametrize("optimizer", [None, SGD(lr=0.3), Adagrad(lr=0.1), Adam(lr=0.01)])
def test_in_mode_sync_a_step_is_that_of_one_array(comm, optimizer):
    """With the sum of all workers, in their order; nothing is seen of it before the step."""
    tables = [
        ArrayTable(name=name, shape=shape, optimizer=optimizer) for name, shape in SHAPES.items()
    ]
    for servers in server_counts(comm):
        merge = "mean" if optimizer else "sum"  # which plain sums know nothing of
        learner = learner_on(comm, servers, mode="sync", merge=merge, tables=tables)
        arrays = {name: Parameters({"x": np.zeros(s, np.float32)}) for name, s in SHAPES.items()}
        steps = {name: optimizer.bind(x) for name, x in arrays.items()} if optimizer else {}
        workers, k = comm.size - servers, learner.comm.rank
        for step in range(0 if learner.serves else 3):
            for name, table in learner.tables.items():
                table.add(values_of(SHAPES[name], k, step), samples=1 + k)
                np.testing.assert_array_equal(table.get(), arrays[name]["x"])
            learner.gradient.flat[:] = k
            learner.step(samples=1 + k)
            for name, table in learner.tables.items():
                total = np.zeros(SHAPES[name], np.float32)
                for j in range(workers):
                    total += values_of(SHAPES[name], j, step)
                if optimizer:
                    steps[name](total.reshape(-1), workers * (workers + 1) // 2)
                else:
                    arrays[name].flat += total.reshape(-1)
                assert table.get().tobytes() == arrays[name]["x"].tobytes(), (name, step)
        learner.finish()


def test_one_worker_sets_what_all_get(comm):
    """And begins anew where an optimizer remembers something."""
    table = ArrayTable(name="t", shape=(30, 2), optimizer=Adagrad(lr=1.0), initial_scale=0.5)
    for servers in server_counts(comm):
        learner = learner_on(comm, servers, tables=(table,))
        if not learner.serves:
            t, values = learner.tables["t"], values_of((30, 2), 1)
            begin = t.get()
            assert 0 < np.abs(begin).max() < 0.5 and len(np.unique(begin)) > 50
            learner.comm.barrier()
            if learner.comm.rank == 0:
                t.add(np.full((30, 2), 100.0, np.float32))
                t.set(values)
                t.set(-values[:3], np.array([9, 2, 5]))
                values[[9, 2, 5]] = -values[:3]
                np.testing.assert_array_equal(t.get(), values)
                t.add(np.full((1, 2), 2.0, np.float32), [2])  # a first step: by the rate
                np.testing.assert_allclose(t.get([2]), values[[2]] - 1, rtol=1e-6)
            learner.meet()
            values = learner.comm.allgather_object(values)[0]
            np.testing.assert_array_equal(t.get([9, 5]), values[[9, 5]])
        learner.finish()


def test_checkpoints_hold_arrays_on_any_number_of_servers(comm, tmp_path):
    folder = shared(comm, tmp_path)
    learner = learner_on(comm, 0)
    saved = {}
    for name, table in learner.tables.items():
        table.add(values_of(SHAPES[name], comm.rank))
        learner.meet()
        saved[name] = table.get()
    learner.gradient.flat[:] = 1
    learner.step(samples=1)
    Checkpoints(folder).save(learner, background=False)
    learner.tables["long"].add(np.ones(2500, np.float32))
    learner.finish()
    for servers in server_counts(comm):
        learner = learner_on(comm, servers)
        if not learner.serves:
            load_checkpoint(learner, folder)
            for name, table in learner.tables.items():
                assert saved[name].any()
                np.testing.assert_array_equal(table.get(), saved[name])
        learner.finish()


def test_what_is_not_possible_is_refused_and_nothing_changes(comm):
    learner = learner_on(comm, min(1, comm.size - 1))
    matrix, long = learner.tables["matrix"], learner.tables["long"]
    if learner.serves:
        with pytest.raises(UserError, match=r"^table 'matrix': a rank that only serves"):
            matrix.get()
    else:
        ones = np.ones((2, 4), np.float32)
        for rows, problem in [
            ([0, 7], "rows of table 'matrix' must be from 0 to 6: number 1 is 7"),
            ([-1, 0], "rows of table 'matrix' must be from 0 to 6: number 0 is -1"),
            ([0.5, 1], r"rows of .* whole numbers \[m\]: it is .*float64 \[2\]"),
            (np.zeros((1, 2), int), r"rows of .* whole numbers \[m\]: it is .*\[1, 2\]"),
        ]:
            for call in (matrix.get, lambda rows: matrix.add(ones, rows)):
                with pytest.raises(UserError, match=f"^{problem}"):
                    call(rows)
        for delta in (ones.astype(float), ones[:, :3], [[1.0]]):
            with pytest.raises(UserError, match=r"^delta for table 'matrix' must be .* \[2, 4\]:"):
                matrix.add(delta, [0, 1])
        with pytest.raises(
            UserError, match=r"^rows of table 'long' must be omitted: the table has one"
        ):
            long.get([3])
        with pytest.raises(UserError, match=r"^rows of table 'matrix' to set must all be differ"):
            matrix.set(ones, [1, 1])
        for change in (matrix.add, matrix.set):
            with pytest.raises(UserError, match=r"of table 'matrix' (is|are) not finite"):
                change(ones * np.inf, [0, 1])
        assert not matrix.get().any() and matrix.counts()["rows"] == 0
    learner.finish()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "name='' must be a text that is not empty"),
        ({"shape": ()}, r"shape=\(\) of table 't' must be one or more whole numbers"),
        ({"shape": (3, 0)}, "shape of table 't': dimension=0 must be a whole number"),
        ({"shape": (3, 2**11, 2**10)}, r"shape=\(3, 2048, 1024\) of table 't' must have at most"),
        ({"optimizer": MomentumSGD(lr=1)}, "optimizer=MomentumSGD of table 't' must be an SGD"),
        ({"initial_scale": -1}, "initial_scale=-1 must be a finite number"),
    ],
)
def test_options_that_are_not_possible(options, message):
    with pytest.raises(UserError, match=f"^{message}"):
        ArrayTable(**{"name": "t", "shape": (2,), **options})
    with pytest.raises(UserError, match=r"^tables=\[3\] must be a sequence of Embedding or Array"):
        DataParallelASGD(tables=[3])
