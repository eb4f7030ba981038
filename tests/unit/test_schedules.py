"""Schedules by samples, at their points, between them and behind the last."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest

from parallel_sgd import UserError
from parallel_sgd.schedules import Cosine, Linear, Steps


def test_steps():
    steps = Steps({1000: 0.01, 0: 0.1, 50: 0.2})  # in any order
    expected = {0: 0.1, 49: 0.1, 50: 0.2, 999: 0.2, 1000: 0.01, 10**12: 0.01}
    assert {samples: steps(samples) for samples in expected} == expected


def test_linear():
    line = Linear({0: 0.0, 100: 0.4, 300: 0.2})
    expected = {0: 0.0, 25: 0.1, 100: 0.4, 200: 0.3, 300: 0.2, 10**12: 0.2}
    assert {samples: line(samples) for samples in expected} == pytest.approx(expected)
    assert Linear({0: 0.3})(99) == 0.3


def test_cosine():
    cosine = Cosine(start=1.0, end=0.2, samples=400)
    half = math.sqrt(0.5)
    expected = {0: 1.0, 100: 0.6 + 0.4 * half, 200: 0.6, 300: 0.6 - 0.4 * half, 400: 0.2, 9999: 0.2}
    assert {samples: cosine(samples) for samples in expected} == pytest.approx(expected)


@pytest.mark.parametrize("kind", [Steps, Linear])
@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "={} must begin at 0 samples"),
        ({1: 0.1}, "={1: 0.1} must begin at 0 samples"),
        ({-1: 0.1, 0: 0.2}, ": samples=-1 must be a whole number, at least 0"),
        ({0: 0.1, 1.5: 0.2}, ": samples=1.5 must be a whole number, at least 0"),
        ({0: 0.1, math.nan: 0.2}, ": samples=nan must be a whole number, at least 0"),
        ({0: 0.1, None: 0.2}, ": samples=None must be a whole number, at least 0"),
        ({False: 0.1}, ": samples=False must be a whole number, at least 0"),
        ({0: math.nan}, "[0]=nan must be a finite number, at least 0"),
        ({0: 0.1, 9: math.inf}, "[9]=inf must be a finite number, at least 0"),
        ({0: -1}, "[0]=-1 must be a finite number, at least 0"),
        ({0: 1e40}, "[0]=1e+40 must be a finite number, at least 0, also in float32"),
        ({0: "0.1"}, "[0]='0.1' must be a finite number, at least 0"),
        (None, "=None must be a mapping from samples to values"),
        (0.1, "=0.1 must be a mapping from samples to values"),
        ([0.1], "=[0.1] must be a mapping from samples to values"),
    ],
    ids=str,
)
def test_points_that_are_not_possible(kind, values, problem):
    with pytest.raises(UserError) as caught:
        kind(values)
    assert str(caught.value) == f"{kind.__name__} values{problem}"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"samples": 0}, "samples=0 must be a whole number, at least 1"),
        ({"samples": -5}, "samples=-5 must be a whole number, at least 1"),
        ({"samples": 1e3}, "samples=1000.0 must be a whole number, at least 1"),
        ({"samples": None}, "samples=None must be a whole number, at least 1"),
        ({"start": math.nan}, "start=nan must be a finite number, at least 0"),
        ({"end": -0.1}, "end=-0.1 must be a finite number, at least 0"),
    ],
)
def test_cosines_that_are_not_possible(options, problem):
    with pytest.raises(UserError, match=f"^Cosine: {problem}$"):
        Cosine(**{"start": 1, "samples": 10, **options})


@pytest.mark.parametrize("kind", [Steps, Linear])
def test_points_are_plain_values_in_order(kind):
    given = {np.int64(10): np.float32(0.5), 0: np.float64(0.25), 5: 1}
    schedule = kind(given)
    assert repr(schedule) == f"{kind.__name__}(values={{0: 0.25, 5: 1.0, 10: 0.5}})"
    assert schedule == kind({0: 0.25, 5: 1.0, 10: 0.5})
    assert schedule.values == {0: 0.25, 5: 1.0, 10: 0.5}
    assert len({schedule, kind({0: 0.25, 5: 1, 10: 0.5}), kind({0: 0.25})}) == 2


def test_points_are_copied_and_stay():
    given = {0: 0.1, 10: 0.2}
    steps = Steps(given)
    given[0] = 99.0
    del given[10]
    assert (steps(0), steps(10)) == (0.1, 0.2)
    with pytest.raises(TypeError):
        steps.values[0] = 1.0
    for other in (copy.copy(steps), copy.deepcopy(steps), pickle.loads(pickle.dumps(steps))):
        assert other == steps
        assert (repr(other), hash(other)) == (repr(steps), hash(steps))


def test_a_cosine_has_plain_values():
    cosine = Cosine(start=np.float64(1), end=np.float32(0.5), samples=np.int64(40))
    assert repr(cosine) == "Cosine(start=1.0, end=0.5, samples=40)"
