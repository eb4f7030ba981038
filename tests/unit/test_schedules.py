"""Schedules by samples, at their points, between them and behind the last."""

from __future__ import annotations

import math

import pytest

from parallel_sgd import UserError
from parallel_sgd.schedules import Cosine, Linear, Steps, value_at


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


def test_value_at_takes_numbers_too():
    assert value_at(0.5, 10**9) == 0.5
    assert value_at(Steps({0: 1.0, 10: 2.0}), 10) == 2.0


@pytest.mark.parametrize("kind", [Steps, Linear])
@pytest.mark.parametrize("points", [{}, {1: 0.1}, {-1: 0.1, 0: 0.2}])
def test_the_first_point_is_at_no_samples(kind, points):
    with pytest.raises(UserError, match=f"{kind.__name__}.*the first point must be at 0 samples$"):
        kind(points)


@pytest.mark.parametrize("samples", [0, -5])
def test_a_cosine_needs_some_length(samples):
    with pytest.raises(UserError, match=f"samples={samples} must be at least 1"):
        Cosine(start=1, samples=samples)
