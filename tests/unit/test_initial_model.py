"""A model begins as another one ended."""

from __future__ import annotations

import numpy as np
import pytest

import parallel_sgd as psgd
from parallel_sgd import UserError
from parallel_sgd.training import read_model, set_parameters


def saved(folder, model):
    run = psgd.RunFolder(folder)
    run.create()
    run.write_model(model.parameters)
    return folder


def test_it_begins_as_the_other_ended(tmp_path):
    other = psgd.models.MLP([4, 8, 3], seed=5)
    folder = saved(tmp_path / "run", other)
    for path in (folder, folder / "model.npz"):
        model = psgd.models.MLP([4, 8, 3], seed=1, dtype=np.float64)
        set_parameters(model.parameters, read_model(path))
        assert np.array_equal(model.parameters.flat, other.parameters.flat)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([4, 9, 3], r"its parameter W1 is \[4, 8\], but here \[4, 9\]"),
        ([4, 3], r"its parameter W1 is \[4, 8\], but here \[4, 3\]"),
        ([4, 8, 3, 3], r"its parameter W3 is missing, but here \[3, 3\]"),
    ],
)
def test_another_model_changes_nothing(tmp_path, sizes, message):
    values = read_model(saved(tmp_path / "run", psgd.models.MLP([4, 8, 3], seed=5)))
    model = psgd.models.MLP(sizes, seed=1)
    before = model.parameters.flat.copy()
    with pytest.raises(UserError, match=message):
        set_parameters(model.parameters, values)
    assert np.array_equal(model.parameters.flat, before)


def test_what_is_no_model(tmp_path):
    values = read_model(saved(tmp_path / "run", psgd.models.MLP([4, 3])))
    model = psgd.models.MLP([4, 3])
    values["b1"][1] = np.nan
    with pytest.raises(UserError, match="its parameter b1 must hold finite numbers"):
        set_parameters(model.parameters, values)
    (tmp_path / "text.npz").write_text("no model")
    np.savez(tmp_path / "objects.npz", W1=np.array([{}], object))
    for path, message in [
        (tmp_path / "none", "there is no such file"),
        (tmp_path / "text.npz", "is not a model.npz"),
        (tmp_path / "objects.npz", "is not a model.npz"),
    ]:
        with pytest.raises(UserError, match=message):
            read_model(path)
