"""The data of train.py: what its options say, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest

from parallel_sgd import UserError
from parallel_sgd.command_line import read, read_data


def data_of(*given):
    options, _, _ = read(["--data", *map(str, given)])
    return read_data(options)


def test_streams_of_cntk_text(tmp_path):
    file = tmp_path / "own.ctf"
    file.write_text("".join(f"|x {i} 1 |words 0:{i} |y {i % 3}:1\n" for i in range(10)))
    streams = "streams={'x': Dense(2), 'words': None, 'y': Sparse(3, one_hot=True)}"
    data = data_of(file, "--reader", streams)
    assert (len(data.train), data.task.classes) == (8, 3)
    x, y = data.train.read(np.arange(8))
    assert np.array_equal(x[:, 0] % 3, y)


@pytest.mark.parametrize(
    ("reader", "problem"),
    [
        ("streams={'x': Dense()}", "reader=\"streams={'x': Dense()}\": "),
        ("streams={'x': Dense(0)}", "dimension=0 must be a whole number"),
        ("streams={'x': print(1)}", "streams=\"{'x': print(1)}\" must be a mapping"),
        ("test=0.5", "reader='test=0.5': test is no option of a reader, see --test"),
        ("path=y.npz", "reader='path=y.npz': path is no option of a reader, see --data"),
        ("format=npz", "reader='format=npz': format is no option of a reader, see --format"),
    ],
)
def test_readers_options_that_are_none(tmp_path, reader, problem):
    (tmp_path / "own.ctf").write_text("|x 1\n")
    with pytest.raises(UserError, match=re.escape(problem)):
        data_of(tmp_path / "own.ctf", "--reader", reader)


@pytest.mark.parametrize("fraction", [0.999, 0.001])
def test_nothing_to_validate_on_or_to_train_on(tmp_path, fraction):
    np.savez(tmp_path / "own.npz", x=np.eye(20), y=np.arange(20) % 2)
    with pytest.raises(UserError, match=rf"validation={fraction} must leave at least one of 16"):
        data_of(tmp_path / "own.npz", "--validation", fraction)
