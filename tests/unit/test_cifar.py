"""CIFAR's binary version: what is read back, and which record is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
from fake_learners import Comm, Learner

from parallel_sgd import data
from parallel_sgd.errors import UserError

TRAIN = [f"data_batch_{i}.bin" for i in range(1, 6)]


def records(count, seed, labels=1):
    content = np.random.default_rng(seed).integers(0, 256, (count, labels + 3072), np.uint8)
    content[:, :labels] %= np.array([20, 100] if labels == 2 else [10], np.uint8)
    return content


@pytest.fixture
def folder(tmp_path):
    """CIFAR-10 of 7 to 11 images a file, so that no two have one length."""
    for i, name in enumerate([*TRAIN, "test_batch.bin"]):
        (tmp_path / name).write_bytes(records(7 + i, i).tobytes())
    return tmp_path


def test_cifar_10_is_images_in_the_order_of_the_files(folder):
    train, test = data.cifar10(folder)
    assert (len(train), len(test)) == (7 + 8 + 9 + 10 + 11, 12)
    stored = np.concatenate([records(7 + i, i) for i in range(5)])
    indexes = np.array([44, 0, 7, 6, 15, 44])
    x, y = train.read(indexes)
    assert x.dtype == np.float32 and y.dtype == np.int64
    expected = stored[indexes, 1:].reshape(-1, 3, 32, 32) / np.float32(255)
    assert (x == expected).all() and (y == stored[indexes, 0]).all()
    assert (train.targets(np.arange(45)) == stored[:, 0]).all()
    assert train.read(indexes, dtype=None)[0].dtype == np.float32
    assert train.read(np.arange(0))[0].shape == (0, 3, 32, 32)
    assert train.classes == test.classes == 10 and train.repeatable
    assert isinstance(test.x.base, np.memmap)
    assert (test.arrays()[1] == records(12, 5)[:, 0]).all()


def test_cifar_100_has_two_labels(tmp_path):
    for i, name in enumerate(["train.bin", "test.bin"]):
        (tmp_path / name).write_bytes(records(9 + i, i, labels=2).tobytes())
    for column, (label, classes) in enumerate([("coarse", 20), ("fine", 100)]):
        train, test = data.cifar100(tmp_path, label=label)
        for part, stored in ((train, records(9, 0, 2)), (test, records(10, 1, 2))):
            x, y = part.arrays()
            assert (y == stored[:, column]).all() and part.classes == classes
            assert (x.reshape(len(x), -1) == stored[:, 2:] / np.float32(255)).all()
    assert data.cifar100(tmp_path)[0].classes == 100
    with pytest.raises(UserError, match=r"^label='both' must be 'coarse' or 'fine'"):
        data.cifar100(tmp_path, label="both")


def test_a_folder_without_a_test_file_is_training_data(folder, tmp_path):
    (folder / "test_batch.bin").unlink()
    (tmp_path / "train.bin").write_bytes(records(10, 0, labels=2).tobytes())
    for name, samples, options in (("cifar10", 45, {}), ("cifar100", 10, {"label": "coarse"})):
        assert len(data.load(folder, format=name, **options)) == samples
        parts = data.load_train_test(folder, format=name, test=1, **options)
        assert [*map(len, parts)] == [samples - 1, 1]
    (tmp_path / "test.bin").write_bytes(records(3, 1, labels=2).tobytes())
    with pytest.raises(UserError, match="holds training data and test data"):
        data.load(folder, format="cifar100")
    assert [*map(len, data.load_train_test(folder, format="cifar100"))] == [10, 3]


def test_a_label_out_of_range_is_refused_by_file_and_record(folder):
    content = records(8, 1)
    content[5, 0] = 10
    (folder / TRAIN[1]).write_bytes(content.tobytes())
    train, _ = data.cifar10(folder)
    message = re.escape(f"{folder / TRAIN[1]}: y[5] = 10 is out of range: must be from 0 to 9")
    for classes in (None, 10, 1000):
        with pytest.raises(UserError, match=f"^{message}$"):
            train.read(np.array([7 + 5, 0]), classes=classes)
    train.read(np.array([7 + 4, 7 + 6]))
    minibatches = data.Source(train, minibatch_size=4, shuffle=False, dtype=None)
    with pytest.raises(UserError, match=r"data_batch_2.bin: y\[5\] = 10 is out of range"):
        list(minibatches.minibatches(Learner(Comm(0, 1))))


def test_what_is_not_of_whole_records_is_refused(folder):
    path = folder / "test_batch.bin"
    whole = path.read_bytes()
    for content, where in [
        (whole[:-1], r"record 11 has 3072"),
        (whole + b"a", r"record 12 has 1"),
        (whole[:100], r"record 0 has 100"),
        (b"", "it has none"),
    ]:
        path.write_bytes(content)
        line = f"^{path} must be records of 3,073 bytes, as in CIFAR-10: {where}$"
        with pytest.raises(UserError, match=line):
            data.cifar10(folder)
    path.unlink()
    with pytest.raises(UserError, match=f"^{path}: there is no such file"):
        data.cifar10(folder)


def test_joined_data_sets_must_be_alike():
    def some(shape, y):
        return data.Arrays(np.zeros((3, *shape)), np.asarray(y))

    both = data.Joined([some((2,), [0, 1, 2]), some((3,), [0, 1, 2])])
    both.read(np.array([0, 1]))
    with pytest.raises(
        UserError, match=r"^x must have the same shape and type in all data sets: \[3\] float32"
    ):
        both.read(np.array([0, 4]))
    both = data.Joined([some((2,), [0, 1, 2]), some((2,), [0.5, 1, 2])])
    with pytest.raises(UserError, match=r"^y must have the same shape and type in all data sets"):
        both.arrays()
    with pytest.raises(UserError, match="must be at least one data set"):
        data.Joined([])
