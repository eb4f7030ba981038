"""Parquet and Arrow files: which groups are decoded, by whom; what is refused, by file and row."""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from fake_learners import Comm, Learner
from reader_table import write_columns

from parallel_sgd import data
from parallel_sgd.data.order import GroupedOrder
from parallel_sgd.data.readers import column_files
from parallel_sgd.errors import UserError

pa = pytest.importorskip("pyarrow")

FORMATS = {"parquet": data.load_parquet, "arrow": data.load_arrow}


def numbered(rows, first=0):
    """Rows that tell which they are."""
    y = np.arange(first, first + rows)
    return {"a": y.astype(np.float32), "b": -y.astype(np.float64), "y": y}


@pytest.fixture(params=FORMATS)
def form(request):
    return request.param


@pytest.fixture
def decoded(monkeypatch):
    """How often each (file, group) has been read, in the order of the reading."""
    seen, read = [], column_files.ColumnFile.read

    def counted(self, group, columns):
        seen.append((self.path.name, group))
        return read(self, group, columns)

    monkeypatch.setattr(column_files.ColumnFile, "read", counted)
    return seen


@pytest.mark.parametrize("type_", ["list", "large_list", "fixed"])
def test_a_column_of_lists_is_x(tmp_path, form, type_):
    rows = np.arange(30).reshape(10, 3)
    make = {"list": pa.list_, "large_list": pa.large_list, "fixed": lambda t: pa.list_(t, 3)}[type_]
    table = {"x": pa.array(rows.tolist(), make(pa.float32())), "label": rows[:, 0] % 2 == 1}
    columns = FORMATS[form](write_columns(tmp_path / f"d.{form}", table))
    x, y = columns.read(np.array([9, 0, 4]))
    assert x.dtype == np.float32 and (x == rows[[9, 0, 4]]).all() and y.tolist() == [1, 0, 0]
    assert columns.read(np.arange(0))[0].shape == (0, 3)
    tags = FORMATS[form](tmp_path / f"d.{form}", x="label", y="x")
    assert (tags.arrays()[1] == rows).all()


def test_the_files_of_a_folder_have_the_same_types(tmp_path, form):
    write_columns(tmp_path / f"a.{form}", numbered(7))
    other = {**numbered(3), "a": np.arange(3)}
    write_columns(tmp_path / f"d.{form}", other)
    with pytest.raises(
        UserError, match=rf"d.{form}: column 'a' holds int64: must be float, as in "
    ):
        data.load(tmp_path)
    del other["a"]
    write_columns(tmp_path / f"d.{form}", other)
    with pytest.raises(UserError, match=rf"d.{form}: column 'a' holds nothing: must be float, as "):
        data.load(tmp_path)


@pytest.mark.parametrize("note", ["named", "json", "none"])
def test_an_index_of_a_data_frame_is_no_feature(tmp_path, form, note):
    """As pandas writes the DataFrame that was filtered; and what was set to be an index."""
    table = pa.table({"a": [1.0, 2], "id": [7, 3], "__index_level_0__": [5, 9], "y": [0, 1]})
    notes = {
        "named": b'{"index_columns": ["id", "__index_level_0__", {"kind": "range"}]}',
        "json": b'{"index_columns": ["id"',
        "none": None,
    }
    noted = table.replace_schema_metadata({b"pandas": notes[note]} if notes[note] else None)
    path = write_columns(tmp_path / f"d.{form}", noted)
    x = ("a",) if note == "named" else ("a", "id")
    assert FORMATS[form](path).x_columns == x
    assert FORMATS[form](path, x=["__index_level_0__"]).arrays()[0].tolist() == [[5], [9]]
    write_columns(path, {"Unnamed: 0": [0, 1], "a": [1.0, 2], "y": [0, 1]})
    assert FORMATS[form](path).arrays()[0].tolist() == [[1], [2]]
    for content in (b"[]", b"3", b'{"index_columns": 3}', b'{"index_columns": [[1], null]}'):
        write_columns(path, table.replace_schema_metadata({b"pandas": content}))
        assert FORMATS[form](path).x_columns == ("a", "id")


def epoch(columns, size, minibatch_size=8, seed=0, number=0, **options):
    """Labels by rank and minibatch, of ranks that each have their own data set."""
    ranks = []
    for rank in range(size):
        learner = Learner(Comm(rank, size))
        source = data.Source(columns[rank], None, minibatch_size, epochs=2, seed=seed, **options)
        ranks.append([y.tolist() for _, y in source.epoch(number, learner)])
    return ranks


def test_what_fits_is_decoded_once_and_shuffled_as_arrays_are(tmp_path, form, decoded):
    path = write_columns(tmp_path / f"d.{form}", numbered(40))
    columns = FORMATS[form](path)
    assert decoded == [] and columns.repeatable and columns.groups(np.arange(3)) is None
    columns.read(np.array([5]))
    assert set(decoded) == {(path.name, 1)}
    as_arrays = data.Arrays(np.zeros((40, 1)), np.arange(40))
    for number in range(2):
        assert epoch([columns], 1, number=number) == epoch([as_arrays], 1, number=number)
    assert Counter(decoded) == {(path.name, group): 1 for group in range(10)}


BYTES = 24  #: of a row of `numbered`, whose x holds float64


def test_what_does_not_fit_is_read_in_parts_by_each_rank(tmp_path, decoded):
    """Of 32 groups of 16 rows 8 are in use at a time, by 4 ranks: each reads about a quarter."""
    path = write_columns(tmp_path / "d.parquet", numbered(512), group=16)

    def opened():
        return data.load_parquet(path, most_bytes=8 * 16 * BYTES)

    assert opened().open_groups == 8 and not opened().repeatable
    (serial,) = epoch([opened()], 1, 64)
    assert sorted(chain(*serial)) == list(range(512))
    reads = []
    for rank in range(4):
        columns, learner = opened(), Learner(Comm(rank, 4))
        source = data.Source(columns, None, 64, epochs=2)
        source.meet(learner)
        del decoded[:]
        parts = [y.tolist() for _, y in source.epoch(0, learner)]
        assert [part == whole[16 * rank :][:16] for part, whole in zip(parts, serial, strict=True)]
        assert all(len(part) == 16 for part in parts)
        reads.append(len(decoded))
    assert max(reads) < 22 and sum(reads) < 2 * 32  # at random it would be 128 groups, of all ranks
    assert sum(map(len, serial)) == 512
    again = epoch([opened()], 1, 64, number=1)[0]
    assert again != serial and sorted(chain(*again)) == list(range(512))
    assert epoch([opened()], 1, 64) == [serial]
    groups = [{row // 16 for row in part} for part in serial[:2]]
    assert len(groups[0]) == 8 and groups[0] == groups[1]  # shuffled among 8 of them


def test_alone_every_group_is_decoded_once_an_epoch(tmp_path, decoded):
    path = write_columns(tmp_path / "d.parquet", numbered(512), group=16)
    columns = data.load_parquet(path, most_bytes=8 * 16 * BYTES)
    train, test = data.flattened(columns).split(0.25)
    source = data.Source(train, None, 40, epochs=2)
    source.meet(Learner())
    del decoded[:]
    for number in range(2):
        list(source.epoch(number, Learner()))
    assert len(decoded) <= 2 * 32 + 16  # and those of the samples that were compared
    del decoded[:]
    for begin in range(0, len(test), 10):
        test.read(np.arange(begin, min(begin + 10, len(test))))
    assert set(Counter(decoded).values()) == {1} and len(decoded) > 24


def test_the_order_of_groups_is_a_permutation_of_its_windows():
    groups = np.repeat(np.arange(12), 5)

    def minibatches(epoch):
        order = GroupedOrder(groups, 3, seed=1, epoch=epoch)
        return [order[begin : begin + 6] for begin in range(0, 60, 6)]

    order = np.concatenate(minibatches(2))
    assert sorted(order) == list(range(60))
    windows = [set(groups[part].tolist()) for part in np.split(order, 4)]
    assert all(len(window) == 3 for window in windows) and len(set.union(*windows)) == 12
    assert windows[0] != {0, 1, 2}
    for minibatch in minibatches(2):
        runs = 1 + np.count_nonzero(np.diff(groups[minibatch]))
        assert runs == len(set(groups[minibatch].tolist()))  # arranged by group
    assert (np.concatenate(minibatches(3)) != order).any()
    assert GroupedOrder(groups[:0], 3, 1, 3)[0:6].tolist() == []


def test_ranks_that_keep_different_numbers_of_groups_disagree(tmp_path):
    path = write_columns(tmp_path / "d.parquet", numbered(64), group=4)
    learner = Learner()
    data.Source(data.load_parquet(path, most_bytes=8 * BYTES), None, 8).meet(learner)
    assert learner.comm.agreed[0]["groups of samples in use at a time"] == 2


def test_missing_values_are_refused_by_file_and_row(tmp_path, form):
    write_columns(tmp_path / f"a.{form}", numbered(5))
    for column, row in (("a", 6), ("y", 9)):
        table = {name: list(values) for name, values in numbered(11).items()}
        table[column][row] = None
        path = write_columns(tmp_path / f"b.{form}", table)
        columns = data.load(tmp_path)
        columns.read(np.array([0, 5]))
        line = f"^{path}: column '{column}' is null in row {row}: must be a number$"
        with pytest.raises(UserError, match=line):
            columns.arrays()
    lists = [[1.0, 2], [3, 4], [5, 6], [7, 8], [9, 0], [1, None]]
    for values, line in [
        (lists, "column 'x' is null in row 5: must be a number"),
        ([*lists[:5], None], "column 'x' is null in row 5: must be a number"),
        ([*lists[:5], [1.0]], "column 'x' has 1 values in row 5: must be 2, as in row 4"),
        ([*lists[:4], [1.0], [2.0]], "column 'x' has lists of 1 values from row 4: must be 2, as"),
    ]:
        path = write_columns(tmp_path / f"c.{form}", {"x": values, "y": range(6)})
        with pytest.raises(UserError, match=f"^{path}: {line}"):
            data.load(path).arrays()
    path = write_columns(tmp_path / f"d.{form}", {"x": [1.0] * 6 + [np.nan], "y": range(7)})
    with pytest.raises(UserError, match=rf"^{path}: x\[6\]\[0\] = nan is not finite"):
        data.load(path).arrays()
    path = write_columns(tmp_path / f"e.{form}", {"x": [1.0] * 7, "y": [0] * 5 + [3, 0]})
    with pytest.raises(UserError, match=rf"^{path}: y\[5\] = 3 is out of range: must be from 0 to"):
        data.load(path).arrays(classes=3)


def test_wrong_columns_are_refused_with_the_nearest_name(tmp_path, form):
    path = write_columns(
        tmp_path / f"d.{form}", {"height": [1.0], "name": ["a"], "l": [[1.0]], "y": [1]}
    )
    for message, options in [
        ("x='name' of {} holds string: must be numbers", {"x": "name"}),
        ("x='name' of {} holds string: must be numbers", {}),
        (
            "x=['height', 'l']: 'l' of {} holds lists of numbers: must be the",
            {"x": ["height", "l"]},
        ),
        ("most_bytes=0 must be a whole number, at least 1", {"x": "height", "most_bytes": 0}),
    ]:
        line = re.escape(message.format(path))
        with pytest.raises(UserError, match=f"^{line}"):
            FORMATS[form](path, **options)
    write_columns(path, {"a": [1.0]})
    with pytest.raises(UserError, match=r"^y must name a column of .*: it has \['a'\]"):
        FORMATS[form](path)
    with pytest.raises(
        UserError, match=r"^x must name columns of .*: it has none except y=\['a'\]"
    ):
        FORMATS[form](path, y="a")
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["y", "y"])
    write_columns(path, twice)
    with pytest.raises(UserError, match=r"^y='y' of .* occurs twice"):
        FORMATS[form](path)


@pytest.mark.parametrize("rows", [2**62, 2**47, 2**40, -1])
def test_absurd_numbers_of_rows_are_refused_before_memory_is_taken(tmp_path, monkeypatch, rows):
    path = write_columns(tmp_path / "d.parquet", numbered(4))
    opened = column_files.ParquetFile._opened
    claimed = lambda self, file: (opened(self, file)[0], [rows] * 3)  # noqa: E731
    monkeypatch.setattr(column_files.ParquetFile, "_opened", claimed)
    with pytest.raises(
        UserError, match=r"not a well-formed Parquet file: rows|needs .* bytes, but"
    ):
        data.load(path).arrays()
    with pytest.raises(
        UserError, match=r"not a well-formed Parquet file: rows|needs .* bytes, but"
    ):
        data.load(path).split(0.5)
    with pytest.raises(
        UserError, match=r"not a well-formed Parquet|bytes, but|has 4 rows: must be"
    ):
        list(data.Source(data.load(path)).minibatches(Learner()))
