"""`load` knows a format by its name or its folder; tasks are known by y."""

from __future__ import annotations

import re

import numpy as np
import pytest
from reader_table import write_idx

from parallel_sgd import data
from parallel_sgd.data import TASKS, Arrays, Task, count_classes, task_of
from parallel_sgd.errors import UserError


def cifar(folder, names, labels):
    for name in names:
        content = np.zeros((3, labels + 3072), np.uint8)
        content[:, :labels] = np.arange(3)[:, None]
        (folder / name).write_bytes(content.tobytes())


def images(folder):
    image = pytest.importorskip("PIL.Image")
    for name in "ab":
        (folder / name).mkdir(parents=True)
        image.fromarray(np.full((4, 4, 3), 9, np.uint8)).save(folder / name / "0.png")


TRAIN = [f"data_batch_{i}.bin" for i in range(1, 6)]


def test_data_in_two_parts_are_loaded_as_such(tmp_path):
    ten, hundred, mnist = tmp_path / "ten", tmp_path / "hundred", tmp_path / "mnist"
    for folder in (ten, hundred, mnist):
        folder.mkdir()
    cifar(ten, [*TRAIN, "test_batch.bin"], 1)
    cifar(hundred, ["train.bin", "test.bin"], 2)
    for part, n in (("train", 5), ("t10k", 4)):
        for kind, array in (("images-idx3", np.zeros((n, 28, 28))), ("labels-idx1", np.ones(n))):
            write_idx(mnist / f"{part}-{kind}-ubyte.gz", array.astype("u1"))
    images(tmp_path / "images" / "train")
    images(tmp_path / "images" / "val")
    for folder, lengths, options in [
        (ten, (15, 3), {}),
        (hundred, (3, 3), {"label": "fine"}),
        (mnist, (5, 4), {}),
        (tmp_path / "images", (2, 2), {"size": (2, 2), "colour": "grey"}),
    ]:
        both = data.load_train_test(folder, **options)
        assert tuple(map(len, both)) == lengths
        with pytest.raises(
            UserError, match=r"holds training data and test data: data.load_train_test opens bo"
        ):
            data.load(folder, **options)
    assert both[0].read(np.arange(1))[0].shape == (1, 1, 2, 2)


def test_what_cannot_be_loaded_is_refused(tmp_path):
    (tmp_path / "x.dat").touch()
    npz = tmp_path / "d.npz"
    np.savez(npz, x=np.ones((3, 2)), y=np.arange(3))
    known = ", ".join(data.FORMATS)
    for message, arguments, options in [
        (f"{tmp_path}/no: there is no such file", [tmp_path / "no"], {}),
        (f"{tmp_path}/no.npz: there is no such file", [tmp_path / "no.npz"], {}),
        (f"{tmp_path}/x.dat: its format is not known: give format=, one of {known}", ["x.dat"], {}),
        ("format='dat' must be one of 'npz', 'npy'", [npz], {"format": "dat"}),
        ("path=3 must be the path of a file or folder", [3], {}),
        (f"{npz} must be a folder of training and", [npz], {"format": "mnist"}),
    ]:
        if isinstance(arguments[0], str):
            arguments = [tmp_path / arguments[0]]
        for reader in (data.load, data.load_train_test):
            if reader is data.load or options != {"format": "mnist"}:
                with pytest.raises(UserError, match=f"^{re.escape(message)}"):
                    reader(*arguments, **options)


def test_an_own_format_is_one_line(tmp_path, monkeypatch):
    def load_squares(path, *, power=2):
        y = np.loadtxt(path)
        return Arrays(y[:, None] ** power, y, name=str(path))

    monkeypatch.setitem(data.FORMATS, "squares", data.Format(data.ends(".sq"), load_squares))
    (tmp_path / "d.sq").write_text("1\n2\n3\n")
    assert data.load(tmp_path / "d.sq", power=3).arrays()[0].tolist() == [[1], [8], [27]]


def of(y, **options):
    y = np.asarray(y)
    return task_of(Arrays(np.zeros((len(y), 2)), y, name="d.npz"), **options)


def test_the_task_is_what_y_looks_like():
    assert of([0, 2, 1]) == Task("classification", 3, 3)
    assert of([0, 2, 1], classes=5) == Task("classification", 5, 5)
    assert of([0.5, 2, 1]) == Task("regression", 1, None)
    assert of(np.zeros((3, 4))) == Task("regression", 4, None)
    assert of(np.zeros((3, 4), bool)) == Task("multi-label", 4, None)
    assert of([0, 2, 1], task="regression") == Task("regression", 1, None)
    assert of(np.zeros((3, 4)), task="multi-label") == Task("multi-label", 4, None)
    assert of([0, 1, 1], task="multi-label") == Task("multi-label", 1, None)
    needs = "task='classification' needs labels"
    for message, y, options in [
        (r"task='ranking' must be one of 'classification', 'regr", [0, 1], {"task": "ranking"}),
        (rf"d.npz: y has floats \[n\]: {needs} \[n\], whole", [0.5], {"task": TASKS[0]}),
        (rf"d.npz: y has whole numbers \[n, 2\]: {needs}", [[0, 1]], {"task": TASKS[0]}),
        (r"d.npz: y has floats \[n, 2, 2\]: task='regression' needs y", np.zeros((1, 2, 2)), {}),
        (r"classes=3 has no effect without task='classification'", [0.5], {"classes": 3}),
        (r"Arrays\(.* has no samples to infer the task of", [], {}),
        (r"d.npz: y\[1\] = -1 is out of range", [0, -1], {}),
    ]:
        with pytest.raises(UserError, match=f"^{message}"):
            of(y, **options)


def test_classes_are_counted_without_the_inputs_where_these_are_apart(monkeypatch):
    class Slow(data.Dataset):
        def __init__(self):
            self.reads = []

        def __len__(self):
            return 2500

        def read(self, indexes, *, dtype=np.float32, classes=None):
            self.reads.append(len(indexes))
            return np.zeros((len(indexes), 1)), np.asarray(indexes) % 7

    slow = Slow()
    assert count_classes(slow) == 7 and slow.reads == [1024, 1024, 452]
    slow.classes = 9
    assert count_classes(slow) == 9 and count_classes(slow, 12) == 12 and len(slow.reads) == 3
    with pytest.raises(UserError, match=r"^classes=8 must be at least the 9 of"):
        count_classes(slow, 8)
    train, _ = data.flattened(slow).split(10)
    assert train.classes == 9 and task_of(train) == Task("classification", 9, 9)
