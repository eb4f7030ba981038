"""What data sets promise that need no file of the user; their values are in tests of their own."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from parallel_sgd import UserError
from parallel_sgd.data import ByteSequences, ByteWindows, Clicks, NGrams, Source

FILES = {"a.py": b"import os\n", "b.py": b"", "c.py": bytes(range(40)), "d.py": b"\xff"}

DATASETS = {
    "clicks": (Clicks(100, 5, seed=3), np.int64, 1),
    "sequences": (ByteSequences(bytes(range(101)), 10), np.int64, 100),
    "windows": (ByteWindows(FILES, 3), None, 255),
    "n-grams": (NGrams(FILES, (1, 4)), np.int64, 255),
}


@pytest.mark.parametrize("name", DATASETS)
def test_samples_by_index(name):
    dataset, dtype, classes = DATASETS[name]
    x, y = dataset.arrays()
    some = np.random.default_rng(0).integers(len(dataset), size=50)
    for float_type in (np.float64, None):
        found_x, found_y = dataset.read(some, dtype=float_type)
        assert (found_x == x[some]).all() and (found_y == y[some]).all()
        assert found_x.dtype == (dtype or float_type or np.uint8) and found_y.dtype == np.int64
        for found in (found_x, found_y):
            found += 1  # the caller's own
    assert (dataset.read(some)[0] == x[some]).all()
    none_x, none_y = dataset.read(some[:0])
    assert (none_x.shape, none_y.shape) == ((0, *x.shape[1:]), (0, *y.shape[1:]))
    assert (pickle.loads(pickle.dumps(dataset)).arrays()[0] == x).all()
    minibatches = Source(dataset, minibatch_size=8, classes=256)
    assert minibatches.samples_per_epoch == len(dataset)
    with pytest.raises(UserError, match=r"^dtype='int8' must be a float type"):
        dataset.read(some, dtype="int8")
    last = classes - 1
    with pytest.raises(
        UserError, match=rf"^y.* = {classes} is out of range: must be from 0 to {last}"
    ):
        dataset.arrays(classes=classes)
