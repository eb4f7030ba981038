"""What all readers of data files promise, for each format of `reader_table`."""

from __future__ import annotations

import os
import pickle
import re
import sys
import time

import numpy as np
import pytest
from fake_learners import Learner
from reader_table import DAMAGED, LABELS, ROWS, TABLE, VALUES, write_arrays

from parallel_sgd import Communicator, UserError, data, simulate
from parallel_sgd.errors import SharedError

ALL = np.arange(ROWS)


@pytest.fixture(params=TABLE)
def row(request):
    found = TABLE[request.param]
    if found.package:
        pytest.importorskip(found.package[0])
    return found


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def paths(row, folder):
    return row.write(folder, VALUES, LABELS)


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_every_format_has_a_row():
    assert {row.format for row in TABLE.values()} | {"mnist"} == set(data.FORMATS)


def test_samples_are_read_in_any_order(row, paths):
    dataset = row.load(paths)
    assert len(dataset) == ROWS
    indexes = np.array([ROWS - 1, 0, 9, 9])
    for dtype in (np.float32, np.float64, "float16"):
        x, y = dataset.read(indexes, dtype=dtype, classes=3)
        assert x.dtype == dtype and x.flags.c_contiguous and y.dtype == np.int64
        expected = VALUES[indexes] / row.scale
        assert np.allclose(x.reshape(4, -1).T, expected, rtol=1e-3)
        assert y.tolist() == LABELS[indexes].tolist()
    x[...] = 99  # owned by the caller
    x, y = dataset.arrays()
    assert (x == VALUES.astype("f4").reshape(-1, *[1] * (x.ndim - 1)) / np.float32(row.scale)).all()
    assert y.tolist() == dataset.targets(ALL).tolist() == LABELS.tolist()
    none, no_labels = dataset.read(ALL[:0])
    assert none.shape == (0, *x.shape[1:]) and no_labels.shape == (0,)
    own, _ = dataset.read(indexes, dtype=None)
    assert own.dtype.isnative and np.allclose(own.reshape(4, -1).T, expected)
    assert data.task_of(dataset) == data.Task("classification", *[data.count_classes(dataset)] * 2)


def test_the_format_is_recognized_by_the_name(row, paths):
    loaded = row.load(paths)
    if "format" not in row.options:
        asked = row.load(paths, format=row.format)
        assert type(asked) is type(loaded) and (asked.arrays()[1] == LABELS).all()
    train, test = data.load_train_test(*paths, test=1, **row.options)
    assert (len(train), len(test)) == (ROWS - 1, 1)


def test_options_and_labels_that_the_format_has_not(row, paths):
    known = f"it has {', '.join(row.known)}" if row.known else "it has none"
    wrong = [(paths, {"sise": 3}, f"sise=3 is not an option of {row.format} data: {known}")]
    if len(paths) == 2:
        wrong += [
            (paths[:1], {}, f"{paths[0]} needs labels: the {row.format} file of y"),
            (
                (paths[0], "y.dat"),
                {},
                f"labels='y.dat' must be named like the {row.format} file of",
            ),
        ]
    else:
        own = f"labels='y.npy': {paths[0]} ({row.format}) has labels of its own"
        wrong += [((*paths, "y.npy"), {}, own)]
    for arguments, options, message in wrong:
        for reader in (data.load, data.load_train_test):
            with pytest.raises(UserError, match=f"^{re.escape(message)}"):
                reader(*arguments, **{**row.options, **options})


def test_a_file_that_cannot_be_opened(row, paths, folder):
    path = files(folder)[0]
    kept = path.read_bytes()
    for content in (b"", *row.broken):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"^{path} {row.empty}") as caught:
            row.load(paths).arrays()
        assert "\n" not in str(caught.value)
    path.write_bytes(kept)
    loaded = row.load(paths) if row.format == "images" else None  # lists its files when opened
    path.unlink()
    with pytest.raises(
        UserError, match=rf"^{path}:? (there is no such|cannot be read|has changed)"
    ):
        (loaded or row.load(paths)).arrays()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"must be a regular file: it is a pipe"):
        (loaded or row.load(paths)).arrays()
    path.unlink()
    path.mkdir()
    with pytest.raises(
        UserError,
        match=rf"^{path}(/train.bin: there is no| cannot be read: Is a dir| must hold )",
    ):
        (loaded or row.load(paths)).arrays()


def test_a_missing_package_is_named(row, paths, monkeypatch):
    if row.package is None:
        assert row.load(paths)
        return
    monkeypatch.setitem(sys.modules, row.package[0], None)
    with pytest.raises(UserError, match=rf"need .*: pip install '\.\[{row.package[1]}\]'"):
        row.load(paths)


def test_a_label_beyond_the_classes_is_named_by_its_file(row, paths, folder):
    dataset = row.load(paths)
    dataset.read(ALL[:16], classes=2)
    with pytest.raises(
        UserError, match=r"y\[16\] = 2 is out of range: must be from 0 to 1"
    ) as said:
        dataset.read(ALL, classes=2)
    assert str(folder) in str(said.value)


def test_more_than_memory_holds_is_refused(row, paths, memory_pages):
    whole = row.held == "memory" and row.format != "csv"  # its size is in its head
    dataset = None if whole else row.load(paths)
    memory_pages(4)
    with pytest.raises(UserError, match=r"needs [\d,]+ bytes, but this machine's memory has 16"):
        dataset.arrays() if dataset else row.load(paths)


def replace(folder, write):
    """Other files get the names of those that are there."""
    (folder.parent / "other").mkdir()
    write(folder.parent / "other", VALUES[::-1], LABELS)
    for path in files(folder.parent / "other"):
        os.replace(path, folder / path.relative_to(folder.parent / "other"))


def overwrite(folder, write):
    """The same files get another content."""
    (folder.parent / "other").mkdir()
    write(folder.parent / "other", VALUES[::-1], LABELS)
    for path in files(folder.parent / "other"):
        (folder / path.relative_to(folder.parent / "other")).write_bytes(path.read_bytes())


def cut(folder, write):
    """To touch pages that are gone would end the process by a signal, without a line."""
    for path in files(folder):
        os.truncate(path, path.stat().st_size // 30)


def grow(folder, write):
    for path in files(folder):
        with open(path, "ab") as file:
            file.write(b"\n")


def mapped(*paths):
    return data.Arrays(*(np.load(path, mmap_mode="r") for path in paths))


@pytest.mark.parametrize("change", [replace, overwrite, cut, grow])
@pytest.mark.parametrize("name", [*TABLE, "mapped by the caller"])
def test_no_sample_of_another_file_is_trained_on_in_silence(name, change, folder):
    row = TABLE.get(name, TABLE["npy"])
    paths = row.write(folder, VALUES, LABELS)
    dataset = row.load(paths) if name in TABLE else mapped(*paths)
    size = files(folder)[0].stat().st_size
    minibatches = data.Source(dataset, None, 4, shuffle=False).minibatches(Learner())
    seen, said = [next(minibatches)[0]], None
    time.sleep(0.02)  # longer than the clock of the file system ticks
    change(folder, row.write)
    try:
        seen += [x for x, _ in minibatches]
    except SharedError as refused:
        said = str(refused)
    read = np.concatenate([x.reshape(4, -1)[:, 0] for x in seen]) * row.scale
    assert np.allclose(read, VALUES[: len(read)])
    if row.held == "closed" or (row.held == "open" and change is not replace):
        assert said and (str(folder) in said or name not in TABLE)
        left = files(folder)[0].stat().st_size
        changed = "has changed since it was opened: "
        length = f"{changed}it has {left} bytes, and had {size}"
        assert re.search(
            {
                replace: f"{changed}another file now has its name",
                overwrite: rf"{changed}it has (been written to|\d+ bytes, and had)",
                cut: rf"was truncated while in use: .* {left} bytes left of "
                if row.held == "open"
                else length,
                grow: length,
            }[change],
            said,
        )
        if row.held == "open" and len(paths) == 1:  # which holds the labels, too
            with pytest.raises(UserError, match=r"was truncated|has changed"):
                dataset.targets(ALL)
    else:
        assert said is None and len(read) == ROWS


def test_another_process_opens_the_file_anew(row, paths, folder):
    """As the workers of a DataLoader do."""
    dataset = row.load(paths)
    unread = pickle.dumps(dataset)
    dataset.read(ALL[:5])
    kept = pickle.dumps(dataset)
    assert len(kept) < len(unread) + 50  # without the samples read
    again = pickle.loads(kept)
    assert repr(again) == repr(dataset) and data.task_of(again) == data.task_of(dataset)
    for one, other in zip(again.arrays(), dataset.arrays(), strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    time.sleep(0.02)
    grow(folder, row.write)
    if row.held == "memory":  # the samples themselves were sent
        assert np.array_equal(pickle.loads(kept).arrays()[0], again.arrays()[0])
        return
    for late in (lambda: pickle.loads(kept), lambda: again):  # opened, and never opened
        with pytest.raises(
            UserError, match=rf"^{folder}.* has changed since it was opened: it has"
        ):
            late().arrays()


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_an_array_that_its_owner_writes_to_is_no_change(folder, mode):
    np.save(folder / "x.npy", VALUES[:, None].astype(np.float32))
    x = np.load(folder / "x.npy", mmap_mode=mode)
    dataset = data.Arrays(x, LABELS)
    time.sleep(0.02)
    x[:] = 3
    x.flush()
    for own in (dataset, pickle.loads(pickle.dumps(dataset))):
        assert (own.read(np.arange(4))[0] == 3).all()


def test_files_that_are_removed_stay_open(row, paths, folder):
    dataset = row.load(paths)
    for path in files(folder):
        path.unlink()
    if row.held != "closed":
        assert (dataset.arrays()[1] == LABELS).all()


def test_an_array_whose_file_is_removed_is_pickled_whole(folder):
    write_arrays(folder, VALUES, LABELS)
    arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy"]
    for path in files(folder):
        path.unlink()
    x, y = pickle.loads(pickle.dumps(data.Arrays(*arrays))).arrays()
    assert (x[:, 0] == VALUES).all() and (y == LABELS).all()


def test_private_changes_of_mapped_arrays_are_pickled(folder):
    """Also if a view of the changed pages is read-only."""
    write_arrays(folder, VALUES, LABELS)
    x = np.load(folder / "x.npy", mmap_mode="c")
    x -= 100
    view = np.broadcast_to(x, x.shape)
    assert not view.flags.writeable
    y = np.load(folder / "y.npy", mmap_mode="r")
    again, _ = pickle.loads(pickle.dumps(data.Arrays(view, y))).arrays()
    assert np.array_equal(again, x)


def test_a_mapped_file_that_is_missing_is_named(folder):
    write_arrays(folder, VALUES, LABELS)
    arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy"]
    kept = pickle.dumps(data.Arrays(*arrays))
    (folder / "x.npy").unlink()
    with pytest.raises(UserError, match=r"x \(.*x\.npy\): "):
        pickle.loads(kept)


@pytest.mark.parametrize("differ", ["nothing", "values", "labels"])
def test_ranks_that_read_other_samples_disagree(row, differ, tmp_path):
    def body(comm: Communicator):
        folder = tmp_path / f"{comm.rank}"
        folder.mkdir()
        values = VALUES[::-1] if comm.rank and differ == "values" else VALUES
        labels = LABELS // 2 if comm.rank and differ == "labels" else LABELS
        dataset = row.load(row.write(folder, values, labels))
        data.require_same_data("train", dataset, comm)
        return dataset.repeatable

    if differ == "nothing":
        simulate(2, body)
        return
    try:
        compared = not any(simulate(2, body))
    except UserError as error:
        assert "train" in str(error) and "rank" in str(error)
    else:  # only labels are compared where the values of a sample may be slow to read
        assert compared and differ == "values"


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.filterwarnings("ignore")
def test_a_file_that_lacks_its_end_is_refused(name, folder):
    """Other damage is the fuzzer's."""
    row = DAMAGED[name]
    paths = row.write(folder, VALUES, LABELS)
    path = files(folder)[0]
    whole = path.read_bytes()
    for part in range(17):
        path.write_bytes(whole[: len(whole) * part // 17])
        try:
            row.load(paths).arrays()
        except UserError as error:
            assert "\n" not in str(error) and str(folder) in str(error)
        else:
            assert not row.exact


@pytest.fixture(params=[name for name, row in TABLE.items() if row.columns])
def table(request):
    found = TABLE[request.param]
    pytest.importorskip("pyarrow")
    return found


def numbered(rows, first=0):
    """Rows whose columns hold their number."""
    y = np.arange(first, first + rows)
    return {"a": y.astype(np.float32), "b": -0.5 * y, "y": y}


def test_columns_are_chosen_by_name(table, folder):
    path = table.columns(folder / "d", numbered(11))
    one = data.load(path, x="y", y="b")
    assert one.arrays()[0].tolist() == [[i] for i in range(11)]
    assert one.arrays()[1].dtype == np.float32 and one.arrays()[1].tolist() == [
        -i / 2 for i in range(11)
    ]
    assert data.load(path).read(np.array([3]), dtype=None)[0].dtype == np.float64
    several = data.load(path, x=["b"], y=["y", "a"])
    assert several.arrays()[1].tolist() == [[i, i] for i in range(11)]
    assert data.load(path, x=["a"], y=["y"]).arrays()[1].shape == (11, 1)
    for message, options in [
        ("x='bb' is not a column of {}: did you mean 'b'?", {"x": "bb"}),
        ("x='q' is not a column of {}: it has ['a', 'b', 'y']", {"x": ["a", "q"]}),
        ("y='q' is not a column of {}", {"y": "q"}),
        ("x=3.5 must be the name of a column", {"x": 3.5}),
        ("y=[] must be at least one column", {"y": []}),
        ("x must name columns of {}: it has none except y=", {"y": ["a", "b", "y"]}),
    ]:
        with pytest.raises(UserError, match=f"^{re.escape(message.format(path))}"):
            data.load(path, **options)
    path = table.columns(folder / "d", {"Unnamed: 0": [0, 1], "a": [1.0, 2], "y": [0, 1]})
    assert data.load(path).arrays()[0].tolist() == [[1], [2]]  # an index is no feature
    path = table.columns(folder / "d", {"a": [1.0], "b": [2.0]})
    with pytest.raises(UserError, match=r"^y must name a column of "):
        data.load(path)
    path = table.columns(folder / "d", {"x": [1.0] * 6 + [np.inf], "y": range(7)})
    with pytest.raises(UserError, match=rf"^{path}: x\[6\]\[0\] = inf is not finite"):
        data.load(path).arrays()


def test_the_files_of_a_folder_are_one_data_set(table, folder):
    table.columns(folder / "b", numbered(5, first=7))
    table.columns(folder / "a", {key: numbered(7)[key] for key in ("b", "y", "a")})
    table.columns(folder / "b0", numbered(0))
    (folder / "readme.txt").touch()
    both = data.load(folder)
    assert both.targets(ALL[:12]).tolist() == [*range(12)]
    x, _ = both.arrays()
    one = table.columns(folder / "c", {"b": [1.0], "y": [0]})
    assert {*map(tuple, x.tolist())} <= {(i, -i / 2) for i in range(12)} | {
        (-i / 2, i) for i in range(12)
    }
    with pytest.raises(UserError, match=rf"'a'.*{one}|{one}.*'a'"):
        data.load(folder)


@pytest.mark.parametrize(
    "names", [("train-0", "train-1", "test-0"), ("train/0", "train/b", "val/0")]
)
def test_a_folder_of_parts_is_two_data_sets(table, names, folder):
    for i, name in enumerate(names):
        columns = numbered(5 + i, first=10 * i)
        if i == 2:  # in another order, which would be taken for that of the training
            columns = {"more": columns["y"], **dict(reversed(columns.items()))}
        (folder / name).parent.mkdir(exist_ok=True)
        path = table.columns(folder / name, columns)
    train, test = data.load_train_test(folder, y=["y"])
    assert train.arrays()[1].ravel().tolist() == [*range(5), *range(10, 16)]
    assert test.arrays()[1].ravel().tolist() == [*range(20, 27)]
    assert test.arrays()[0].tolist() == [[i, -i / 2] for i in range(20, 27)]
    with pytest.raises(UserError, match=r"data.load_train_test opens both"):
        data.load(folder)
    other = table.columns(folder / "other", numbered(3))
    for reader in (table.both, data.load, data.load_train_test):
        with pytest.raises(
            UserError, match=rf"nothing else.*: it holds .*\['{other.name}'\] of neither"
        ):
            reader(folder)
    other.unlink()
    path.unlink()
    with pytest.raises(UserError, match=r"must hold .*a training part and a test part"):
        table.both(folder)
    (folder / "empty").mkdir()
    if table.format != "csv":
        with pytest.raises(UserError, match=r"empty must hold files whose names end in "):
            data.FORMATS[table.format].load(folder / "empty")
