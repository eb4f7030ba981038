"""What a user has for arrays: taken as it is, or refused in one line."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
import torch

from parallel_sgd import UserError, data, models

Y = np.array([0, 1, 0, 1])


def masked(*shape):
    """An array whose last value is missing, with a fill value under the mask."""
    values = np.arange(float(np.prod(shape))).reshape(shape)
    values.flat[-1] = 9.96921e36
    return np.ma.masked_greater(values, 1e30)


@pytest.mark.parametrize("name", ["x", "y", "list", "items", "sequences", "sequence labels"])
def test_masked_values_are_refused_wherever_arrays_are_taken(name):
    whole = np.ma.masked_greater(np.arange(4.0), 9)  # a mask of nothing
    assert data.Source(whole, np.ma.array(Y)).dataset.arrays()[0].tolist() == [0, 1, 2, 3]
    readers = {
        "x": lambda: data.Source(masked(4, 2), Y),
        "y": lambda: data.Source(np.ones((4, 2)), masked(4)),
        "list": lambda: data.Source([np.ones(2), masked(2)], Y[:2]),
        "items": lambda: data.Source([(np.ones(2), 0), (masked(2), 1)]).dataset.arrays(),
        "sequences": lambda: data.SequenceSource([np.ones(2), masked(3)], Y[:2]),
        "sequence labels": lambda: data.SequenceSource([np.ones(2)] * 4, masked(4)),
    }
    with pytest.raises(
        UserError, match=r"^[xy].* has 1 masked values, the first at \[\d\].*: must "
    ):
        readers[name]()


def test_models_take_no_masked_values():
    model = models.SoftmaxRegression(2, 2)
    calls = (
        lambda: model.gradient(masked(4, 2), Y, out=model.parameters.like()),
        lambda: model.gradient(np.ones((4, 2)), masked(4), out=model.parameters.like()),
        lambda: model.predict(masked(4, 2)),
        lambda: model.evaluate_sums(masked(4, 2), Y),
    )
    for call in calls:
        with pytest.raises(UserError, match=r"^[xy] must have no masked values: fill them"):
            call()
    whole = np.ma.masked_greater(np.ones((4, 2)), 9)
    assert np.array_equal(model.predict(whole), model.predict(whole.data))


def quantities():
    class Quantity(np.ndarray):
        """An array with a unit, whose operations are others."""

        def sum(self, *arguments, **options):
            raise AssertionError("not a plain array")

    return np.ones((4, 2)).view(Quantity)


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_subclasses_become_plain_arrays():
    matrix = np.asmatrix(np.arange(8.0).reshape(4, 2))
    x, _ = data.Arrays(matrix, Y).read(np.array([2, 0]))
    assert type(x) is np.ndarray and x.tolist() == [[4, 5], [0, 1]]
    x, y = data.Arrays(quantities(), np.asmatrix(Y).T).arrays()
    assert type(x) is type(y) is np.ndarray and x.shape == (4, 2) and y.shape == (4, 1)


def times():
    return np.array(["2020-01-01"] * 4, "datetime64[D]")


def sparse():
    return scipy.sparse.csr_array(np.eye(4))


def with_gradient():
    return torch.ones(4, 2, requires_grad=True)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (times, "x must hold plain numbers: it has dtype datetime64[D]"),
        (lambda: times() - times(), "x must hold plain numbers: it has dtype timedelta64[D]"),
        (lambda: np.array(list("abcd")), "x must hold plain numbers: it has dtype <U1"),
        (lambda: np.array([1, None, 2, 3]), "x must hold plain numbers: it has dtype object"),
        (lambda: np.zeros(4, [("a", "f4"), ("b", "i4")]), "x must hold plain numbers: it has dty"),
        (lambda: np.ones(4, complex), "x must hold plain numbers: it has dtype complex128"),
        (sparse, "x must have one row for each sample: it is a scipy.sparse"),
        (with_gradient, "x must be a NumPy array: it is a torch.Tensor (Can't call numpy() on Te"),
        (lambda: [[1, 2], [3]], "x must be a NumPy array: it is a list (setting an array element"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(make, problem):
    with pytest.raises(UserError, match=f"^{re.escape(problem)}"):
        data.Source(make(), Y)


def test_targets_that_are_missing_or_no_labels_are_refused():
    with pytest.raises(UserError, match=r"y\[2\] = nan is not finite"):
        data.Arrays(np.ones(4), np.array([0, 1, np.nan, 1])).arrays()
    with pytest.raises(UserError, match="y must hold integer labels: it has dtype float64"):
        data.Arrays(np.ones(4), Y.astype(float)).arrays(classes=2)
    x = np.arange(16.0).reshape(4, 4)[::2, ::-2]
    assert data.Arrays(x, Y[::-2]).arrays()[0].tolist() == x.tolist()  # not contiguous


class Series:
    """What is looked at of pandas' Series and DataFrame."""

    def __init__(self, values, index):
        self.values = np.array(values)
        self.index = SimpleNamespace(own=index, equals=lambda other: other.own == index)

    def __array__(self, dtype=None, copy=None):
        return self.values


def test_rows_that_are_in_another_order_by_their_index_are_refused():
    x = Series([[1.0], [2], [3]], [7, 8, 9])
    assert len(data.Source(x, Series([0, 1, 0], [7, 8, 9])).dataset) == 3
    assert len(data.Source(x, np.array([0, 1, 0])).dataset) == 3
    with pytest.raises(UserError, match=r"^x and y must have the same index in the same order"):
        data.Source(x, Series([0, 1, 0], [9, 8, 7]))
