"""One flat vector and named views into it, which never come apart."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest

from parallel_sgd import Parameters, UserError

SHAPES = {"W": (3, 4), "b": (4,), "scale": (), "empty": (0, 5), "kernel": (2, 1, 3)}


def parameters(dtype=np.float32):
    random = np.random.default_rng(0)
    return Parameters({name: random.standard_normal(s).astype(dtype) for name, s in SHAPES.items()})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_views_lie_one_behind_the_other(dtype):
    p = parameters(dtype)
    assert p.dtype == dtype
    assert p.flat.flags.c_contiguous
    assert p.shapes == SHAPES
    assert list(p) == list(p.names) == list(SHAPES)
    assert len(p) == 5
    assert p.flat.size == 12 + 4 + 1 + 0 + 6
    assert p.flat.tolist() == np.concatenate([p[name].ravel() for name in p]).tolist()


def test_initial_values_are_copied():
    given = np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4))[:, ::2]
    p = Parameters({"W": given})
    assert np.array_equal(p["W"], given)
    given[:] = -1
    assert p.flat.tolist() == [0, 2, 4, 6, 8, 10]


def test_changes_show_on_both_sides():
    p = parameters()
    p.flat[:] = 0
    p["W"][1, 2] = 5
    p["b"] += 2
    p["scale"] = 7
    assert p.flat.tolist() == [0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 2, 2, 2, 2, 7, 0, 0, 0, 0, 0, 0]
    p.flat += 1
    assert p["W"][1, 2] == 6
    assert p["scale"] == 8


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_views_move_to_another_vector(dtype):
    p = parameters(dtype)
    before, values, views = p.flat, p.flat.copy(), dict(p)
    there = np.arange(len(values), dtype=dtype)
    p.rebind(there)
    assert p.flat is there
    assert p.flat.tolist() == list(range(len(values)))
    assert {name: view.shape for name, view in p.items()} == p.shapes == SHAPES
    assert np.concatenate([view.ravel() for view in p.values()]).tolist() == there.tolist()
    p["b"] = -1
    assert np.count_nonzero(there == -1) == 4
    assert np.array_equal(before, values)
    assert all(np.shares_memory(view, before) for view in views.values() if view.size)


@pytest.mark.parametrize("other", [np.zeros(22, "f4"), np.zeros(24, "f4"), np.zeros(23)], ids=str)
def test_the_views_fit_no_other_vector(other):
    p = parameters()
    before = p.flat
    with pytest.raises(AssertionError):
        p.rebind(other)
    assert p.flat is before


def test_setting_keeps_name_and_shape():
    p = parameters()
    with pytest.raises(KeyError):
        p["new"] = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="broadcast"):
        p["W"] = np.zeros((4, 3), np.float32)
    assert p.shapes == SHAPES


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_like_is_zeros_of_the_same_layout(dtype):
    p = parameters(dtype)
    zeros = p.like()
    assert zeros.shapes == p.shapes
    assert zeros.dtype == dtype
    assert not zeros.flat.any()
    zeros["W"] = 3
    assert zeros.flat.sum() == 36
    assert not np.shares_memory(zeros.flat, p.flat)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["deepcopy", "pickle"]
)
def test_a_copy_keeps_its_views_on_its_own_vector(clone):
    p = parameters()
    other = clone(p)
    assert np.array_equal(other.flat, p.flat)
    other.flat[:] = 9
    assert (other["kernel"] == 9).all()
    other["b"] = 1
    assert other.flat.sum() == 9 * 19 + 4
    assert not (p.flat == 9).any()


def test_blocks_follow_the_layout():
    p = Parameters({name: np.zeros(n, np.float32) for name, n in (("W", 10), ("b", 3), ("c", 2))})
    assert p.block_starts(4).tolist() == [0, 4, 8, 10, 14, 15]
    assert p.block_starts(100).tolist() == [0, 15]


@pytest.mark.parametrize(
    ("arrays", "got"),
    [
        ({}, "none at all"),
        ({"W": np.zeros(3, np.float32), "b": np.zeros(2)}, "float32, float64"),
        ({"W": np.zeros(3, np.int64)}, "int64"),
        ({"W": np.zeros(3, np.float16)}, "float16"),
        ({"W": np.zeros(3, ">f4")}, ">f4"),
    ],
)
def test_other_dtypes_are_refused(arrays, got):
    with pytest.raises(UserError, match=f"one dtype, float32 or float64; got {got}$"):
        Parameters(arrays)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"w": (20,)},
            "parameters['w']=(20,) must be an array with its initial values, as from np.ze",
        ),
        (
            {"w": 20},
            "parameters['w']=20 must be an array with its initial values, as from np.zeros(",
        ),
        ({"w": np.ndarray}, "parameters['w']=<class 'numpy.ndarray'> must be an array with its in"),
        ({"w": [1.0, 2.0]}, "parameters['w']=[1.0, 2.0] must be an array with its initial values"),
        ({3: np.zeros(2)}, "parameters: name 3 must be a text: it is an int"),
        (
            [np.zeros(2)],
            "parameters=[array([0., 0.])] must be a mapping from names to arrays: it is",
        ),
        (
            dict,
            "parameters=<class 'dict'> must be a mapping from names to arrays: it is the class d",
        ),
        (None, "parameters=None must be a mapping from names to arrays: it is None"),
    ],
    ids=str,
)
def test_what_is_no_arrays_by_name_is_refused(arrays, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        Parameters(arrays)


def test_repr_shows_the_layout():
    assert repr(Parameters({"W": np.zeros((2, 3)), "b": np.zeros(3)})) == (
        "Parameters(W[2, 3], b[3]; 9 float64 values)"
    )
