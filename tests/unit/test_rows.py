"""Tables of rows by id against plain dicts and the dense optimizers; what happens to ids before."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from row_model import LAST, POOLS, RowModel, initial

from parallel_sgd import SGD, Adagrad, Adam, UserError
from parallel_sgd.array_files import write_arrays
from parallel_sgd.embedding import Embedding, RowTable, check_tables, server_of
from parallel_sgd.embedding.records import Records
from parallel_sgd.kernels import memory, row_kernels
from parallel_sgd.schedules import Linear

kernels = row_kernels()

OPTIMIZERS = [
    SGD(lr=Linear({0: 0.5, 50: 0.1})),
    SGD(lr_per_sample=0.1),
    Adagrad(lr=0.1),
    Adagrad(lr_per_sample=0.05, epsilon=1e-3, initial_accumulator=0.1),
    Adam(lr=0.1),
    Adam(lr=0.05, beta1=0.0, beta2=0.9, epsilon=1e-3, weight_decay=0.1),
]


class Servers:
    """A table on several servers: each gets its ids, and all get every push's samples."""

    def __init__(self, options, servers):
        self.tables = [RowTable(options) for _ in range(servers)]

    def by_table(self, ids):
        order, starts = kernels.partition(ids, len(self.tables))
        for table, first, last in zip(self.tables, starts[:-1], starts[1:], strict=True):
            yield table, order[first:last]

    def pull(self, ids):
        out = np.full((len(ids), self.tables[0].options.width), np.nan, np.float32)
        for table, here in self.by_table(ids):
            rows = out[here]
            table.pull(ids[here], rows)
            out[here] = rows
        return out

    def push(self, ids, gradient, samples, lr_factor=1.0):
        for table, here in self.by_table(ids):
            table.push(ids[here], gradient[here], samples, lr_factor)

    def moved(self, servers):
        new = Servers(self.tables[0].options, servers)
        for number, table in enumerate(new.tables):
            for old in self.tables:
                table.add(old.contents(), lambda ids, n=number: server_of(ids, servers) == n)
        return new


def contents_by_id(tables):
    """{id: (row, its optimizer's state)} of contents, and the pending ids."""
    rows, counts = {}, {}
    for table in tables:
        contents = table.contents()
        names = [name for name in contents if len(contents[name]) == len(table) and name != "ids"]
        names = [n for n in names if n not in ("samples", "swept") and "pending" not in n]
        for at, number in enumerate(contents["ids"].tolist()):
            assert number not in rows
            rows[number] = {name: contents[name][at].tobytes() for name in names}
        if "pending_ids" in contents:
            numbers, many = contents["pending_ids"].tolist(), contents["pending_counts"].tolist()
            counts.update(zip(numbers, many, strict=True))
            assert len(numbers) == table.pending
    return rows, counts


def compare(servers, model):
    rows, counts = contents_by_id(servers.tables)
    assert set(rows) == set(model.rows)
    assert counts == {number: count for number, (count, _) in model.counts.items()}
    for number, (x, state, pushed) in model.rows.items():
        expected = {"values": x, **state.buffers}
        if isinstance(model.options.optimizer, Adam):
            expected["steps"] = np.int64(state.steps)
        if model.options.evict_after is not None:
            expected["pushed"] = np.int64(pushed)
        assert rows[number] == {name: value.tobytes() for name, value in expected.items()}
    assert sum(map(len, servers.tables)) == len(model.rows)
    assert all(table.samples == model.samples for table in servers.tables)


ids_of_push = st.lists(st.integers(0, 39), unique=True, max_size=25)
operations = st.one_of(
    st.tuples(st.just("push"), ids_of_push, st.integers(1, 9), st.sampled_from([1.0, 0.25])),
    st.tuples(st.just("pull"), st.lists(st.integers(0, 39), max_size=25)),
    st.tuples(st.just("move"), st.integers(1, 3)),
)


@settings(max_examples=150, deadline=None)
@given(
    pool=st.sampled_from(list(POOLS.values())),
    optimizer=st.sampled_from(OPTIMIZERS),
    width=st.sampled_from([1, 3, 8, 17]),
    entry_count=st.sampled_from([1, 1, 2, 3]),
    evict_after=st.sampled_from([None, 1, 3, 20]),
    sequence=st.lists(operations, max_size=15),
)
@example(
    POOLS["one hash"], OPTIMIZERS[4], 3, 2, 20,
    [("push", [*range(25)], 4, 1.0), ("push", [*range(5, 30)], 9, 0.5), ("move", 2),
     ("push", [*range(3, 9)], 9, 1.0), ("pull", [*range(40)])],
)  # fmt: skip
def test_a_table_on_any_servers_is_a_dict(
    pool, optimizer, width, entry_count, evict_after, sequence
):
    options = Embedding(
        name="t",
        width=width,
        optimizer=optimizer,
        seed=3,
        entry_count=entry_count,
        evict_after=evict_after,
    )
    random = np.random.default_rng(0)
    servers, model = Servers(options, 1), RowModel(options)
    evicted = 0  # by tables that are gone
    for name, *arguments in sequence:
        if name == "move":
            evicted += sum(table.evicted for table in servers.tables)
            servers = servers.moved(arguments[0])
            continue
        ids = np.array([pool[i] for i in arguments[0]], np.int64)
        if name == "push":
            samples, factor = arguments[1:]
            gradient = random.standard_normal((len(ids), width)).astype(np.float32)
            given = gradient.copy()
            servers.push(ids, gradient, samples, factor)
            model.push(ids.tolist(), gradient, samples, factor)
            assert np.array_equal(given, gradient)
        pulled = servers.pull(ids)
        assert pulled.tobytes() == model.pull(ids.tolist()).tobytes()
    compare(servers, model)
    assert evicted + sum(table.evicted for table in servers.tables) == model.evicted


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_row_goes_the_way_of_the_dense_optimizer(optimizer):
    """Every row on its own: with Adam, its steps are those in which it was pushed."""
    options = Embedding(name="t", width=9, optimizer=optimizer)
    random = np.random.default_rng(1)
    servers, model = Servers(options, 2), RowModel(options)
    ids = random.integers(0, LAST, 50)
    for step in range(30):
        now = ids[random.random(50) < (0.1 if step % 3 else 0.8)]
        gradient = random.standard_normal((len(now), 9)).astype(np.float32)
        servers.push(now, gradient, 1 + step % 4)
        model.push(now.tolist(), gradient, 1 + step % 4)
    compare(servers, model)


@pytest.mark.parametrize("stride", [1, 2**20, 2**40, 10**11 // 9])
def test_growth_over_many_chunks(stride, monkeypatch):
    """With small chunks: rows stay where they are found, through all that is made anew."""
    monkeypatch.setattr(memory, "LARGE", 1 << 14)
    options = Embedding(name="t", width=5, optimizer=Adagrad(lr=1), evict_after=10**6)
    table, n = RowTable(options), 30_000
    ids = np.random.default_rng(0).permutation(n) * stride
    sizes, first = [], 0
    for size in np.geomspace(1, 4000, 30).astype(int):
        part = ids[first : first + size]
        first += size
        table.push(part, np.ones((len(part), 5), np.float32), 1)
        sizes.append(table.nbytes)
    ids = ids[:first]
    assert len(table) == len(ids) and sizes == sorted(sizes) and len(set(sizes)) > 12
    assert table.nbytes < 1.5 * len(ids) * (2 * 5 * 4 + 8 + 8) + (1 << 15)
    out = np.empty((len(ids), 5), np.float32)
    table.pull(ids, out)
    expected = np.stack([initial(options, i) for i in ids.tolist()]) - np.float32(1)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    contents = table.contents()
    assert contents["ids"].tolist() == ids.tolist()
    assert contents["values"].tobytes() == out.tobytes()
    # half of the rows go, and their memory with them
    kept = ids[::2].copy()
    table.push(kept, np.zeros((len(kept), 5), np.float32), 10**6)
    assert len(table) == len(kept) and table.evicted == len(ids) - len(kept)
    assert table.contents()["ids"].tolist() == kept.tolist()
    assert table.nbytes < 0.7 * sizes[-1]
    table.pull(ids, out)
    np.testing.assert_allclose(out[::2], expected[::2], atol=1e-6)
    np.testing.assert_allclose(out[1::2], expected[1::2] + 1, atol=1e-6)
    table.push(ids[1::2].copy(), np.zeros((len(ids) // 2, 5), np.float32), 1)  # grows again
    assert set(table.contents()["ids"].tolist()) == set(ids.tolist())


def test_a_pull_creates_nothing():
    table = RowTable(Embedding(name="t", width=4))
    before, ids = table.nbytes, np.arange(10**5) * 10**6
    out = np.empty((len(ids), 4), np.float32)
    table.pull(ids, out)
    assert len(table) == 0 and table.nbytes == before
    assert np.array_equal(out[77], initial(table.options, 77 * 10**6))


def test_counts_of_no_more_use_take_no_memory():
    table = RowTable(Embedding(name="t", width=1, entry_count=2))
    for first in range(0, 400_000, 4000):
        ids = np.arange(first, first + 4000)
        for _ in range(2):
            table.push(ids, np.ones((4000, 1), np.float32), 1)
    assert (len(table), table.pending) == (400_000, 0)
    assert table.nbytes - table._rows.nbytes < 10**6


def test_cold_rows_and_counts_are_forgotten():
    options = Embedding(name="t", width=2, optimizer=SGD(lr=1), entry_count=2, evict_after=100)
    table = RowTable(options)

    def push(ids, samples):
        table.push(np.array(ids, np.int64), np.ones((len(ids), 2), np.float32), samples)
        return len(table), table.pending, table.evicted

    push([1, 2, 3], 1)
    assert push([1, 2], 1) == (2, 1, 0)  # clock 2; 3 was counted at 1
    assert push([1], 98) == (2, 1, 0)  # clock 100; a sweep, for which 3 is 99 old
    assert push([1], 25) == (1, 0, 1)  # clock 125
    assert push([3, 2], 1) == (1, 2, 1)  # both begin anew
    assert push([], 98) == (1, 2, 1)  # clock 224; 1 is 99 old
    assert push([], 24) == (1, 2, 1)  # clock 248; it is older now, but was last looked for at 224
    assert push([1, 2], 1) == (2, 0, 1)  # clock 249: just in time, but 3 had been counted at 126
    out = np.empty((1, 2), np.float32)
    table.pull(np.array([1]), out)
    np.testing.assert_allclose(out[0], initial(options, 1) - 1 - 1 / 98 - 1 / 25 - 1, atol=1e-6)


def test_tables_work_in_several_threads_at_once():
    def work(seed):
        random = np.random.default_rng(seed)
        table = RowTable(Embedding(name="t", width=4, optimizer=Adam(lr=0.1), evict_after=40))
        for _ in range(30):
            ids = kernels.unique(random.integers(0, 5000, 1000))[0]
            table.push(ids, random.standard_normal((len(ids), 4)).astype(np.float32), 3)
        return {name: array.tobytes() for name, array in table.contents().items()}

    results = {}
    threads = [threading.Thread(target=lambda s=s: results.update({s: work(s)})) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {seed: work(seed) for seed in range(4)}


def test_a_table_taken_up_goes_on_like_the_one_before():
    """Also where cold rows are still there, because it is not yet time to look for them."""
    old = RowTable(Embedding(name="t", width=1, optimizer=SGD(lr=1), evict_after=100))
    one = np.ones((1, 1), np.float32)
    for number, samples in ((1, 10), (2, 90), (2, 20)):  # looked for at 100; 1 is 110 old at 120
        old.push(np.array([number]), one, samples)
    new = RowTable(old.options)
    new.add(old.contents(), lambda ids: ids >= 0)
    for table in (old, new):
        table.push(np.array([1]), one, 4)
        table.push(np.array([2]), one, 4)
        assert (len(table), table.evicted) == (2, 0)
    assert all(map(np.array_equal, old.contents().values(), new.contents().values()))


def test_contents_without_clocks_count_as_pushed_now():
    plain = Embedding(name="t", width=2)
    old, new = RowTable(plain), RowTable(replace(plain, evict_after=10, entry_count=2))
    old.push(np.array([4, 9]), np.ones((2, 2), np.float32), 1000)
    new.add(old.contents(), lambda ids: ids == 9)
    contents = new.contents()
    assert (contents["ids"].tolist(), contents["pushed"].tolist()) == ([9], [1000])
    assert (new.samples, new.pending) == (1000, 0)


@pytest.mark.parametrize("name", ["samples", "ids", "values", "s"])
def test_files_of_other_options_are_refused(name, tmp_path):
    table = RowTable(Embedding(name="t", width=2))
    table.push(np.array([4, 9]), np.ones((2, 2), np.float32), 1)
    for bad in (None, np.zeros((2, 3)), np.zeros(()), np.array([-9])):
        contents = table.contents()
        contents.pop(name) if bad is None else contents.update({name: bad})
        arrays = {f"0.{key}": array for key, array in contents.items()}
        write_arrays(tmp_path / "tables-00000.safetensors", arrays)
        with pytest.raises(
            UserError, match=r" cannot be read: 0\..* must be .*(but is |at least 0)"
        ):
            check_tables([table.options], str(tmp_path))


def test_what_is_no_id_and_no_row_is_refused():
    table = RowTable(Embedding(name="words", width=2))
    ids, rows = np.arange(3), np.zeros((3, 2), np.float32)
    read_only_column = np.zeros((3, 4), np.float32)[:, ::2]
    cases = [
        (ids.astype(np.int32), rows, r"ids must be int64 \[3\], contiguous; it is int32 \[3\]"),
        (ids.astype(np.uint64), rows, r"ids must be int64 \[3\]"),
        (ids.astype(float), rows, r"ids must be int64 \[3\]"),
        (ids[:, None], rows, r"ids must be int64 \[3\], contiguous; it is int64 \[3, 1\]"),
        (np.arange(6)[::2], rows, r"ids must be .*strides \[16\]"),
        (ids, rows.astype(float), r"(out|gradient) must be float32 \[3, 2\].*it is float64"),
        (ids, np.zeros((3, 3), np.float32), r"(out|gradient) must be float32 \[3, 2\]"),
        (ids, np.zeros((2, 2), np.float32), r"(out|gradient) must be float32 \[3, 2\]"),
        (ids, read_only_column, r"(out|gradient) must be float32 \[3, 2\], contiguous"),
    ]
    for numbers, values, message in cases:
        for call in (
            lambda n=numbers, v=values: table.pull(n, v),
            lambda n=numbers, v=values: table.push(n, v, 1),
        ):
            with pytest.raises(UserError, match=f"^table 'words': {message}"):
                call()
    with pytest.raises(UserError, match=r"^samples=0 must be a whole number, at least 1"):
        table.push(ids, rows, 0)
    table.push(ids[:0], rows[:0], 0)
    assert (len(table), table.samples) == (0, 0)


def test_a_server_has_room_for_so_many_rows_only():
    records = Records((), most=3)
    rows = np.full(4, -1, np.int32)
    with pytest.raises(UserError, match=r"^4 rows on one server: at most 3 are possible"):
        records.insert(np.arange(4), rows, 0)
