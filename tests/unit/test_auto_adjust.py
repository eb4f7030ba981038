"""The rules that adjust training decide as CNTK's do; what is not finite is always rejected."""

from __future__ import annotations

import math

import pytest

from parallel_sgd import AutoLearningRate, AutoMinibatchSize, UserError
from parallel_sgd.training.checkpoint.config import SharedClock

BASE = 2.0


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([2.0, 2.0, 2.0, 2.0], 256),
        ([2.0, 2.01, 2.03, 2.5], 128),
        ([2.0, 2.03, 2.01, 2.5], 192),
        ([2.0, 2.5, 2.5, 2.5], 64),
        ([2.0, math.nan, math.inf, 2.0], 256),
        ([2.0, math.nan, math.inf, math.nan], 64),
        ([math.nan, 1.0, 1.0, 1.0], 64),
        ([math.inf, 1.0, 1.0, 1.0], 64),
        ([-2.0, -1.99, -1.97, -2.5], 256),
    ],
)
def test_the_largest_size_that_learns_as_well(losses, found):
    auto = AutoMinibatchSize()
    sizes = [64, 128, 192, 256]
    tried = iter(losses)
    assert auto.search(sizes, lambda size: next(tried)) == found


@pytest.mark.parametrize(
    ("base", "size", "most", "sizes"),
    [
        (64, 64, 1024, [64, 128]),
        (64, 512, 4096, [256, 384, 512, 704, 1024]),
        (64, 512, 600, [256, 384, 512]),
        (64, 64, 64, [64]),
        (256, 256, 100, [256]),
        (100, 100, 1024, [100, 128, 192]),
        (1, 1, 1024, [1, 2]),
    ],
)
def test_candidates(base, size, most, sizes):
    auto = AutoMinibatchSize(minibatch_size_tuning_max=most)
    assert auto.candidates(base, size) == sizes


@pytest.mark.parametrize(
    ("options", "before", "now", "factor", "rolls_back"),
    [
        ({}, None, 9.0, 1.0, False),
        ({}, BASE, 1.9, 1.0, False),
        ({}, BASE, 2.0, 1.0, False),
        ({}, BASE, 2.1, 0.618, True),
        ({"load_best_model": False}, BASE, 2.1, 0.618, False),
        ({"reduce_learn_rate_if_improve_less_than": 0.1}, BASE, 1.81, 0.618, False),
        ({"reduce_learn_rate_if_improve_less_than": 0.1}, BASE, 1.79, 1.0, False),
        ({"increase_learn_rate_if_improve_more_than": 0.1}, BASE, 1.79, 1.382, False),
        ({"increase_learn_rate_if_improve_more_than": 0.1}, BASE, 1.81, 1.0, False),
        ({"reduce_learn_rate_if_improve_less_than": 0.1}, -BASE, -2.1, 0.618, False),
        ({"increase_learn_rate_if_improve_more_than": 0.01}, -BASE, -2.1, 1.382, False),
        ({}, BASE, math.nan, 0.618, True),
        ({}, BASE, math.inf, 0.618, True),
        ({}, None, math.nan, 0.618, True),
        ({"learn_rate_decrease_factor": 0.5}, BASE, 3.0, 0.5, True),
    ],
)
def test_verdicts(options, before, now, factor, rolls_back):
    assert AutoLearningRate(**options).judge(before, now) == (factor, rolls_back)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (AutoLearningRate, {"learn_rate_decrease_factor": 1.0}),
        (AutoLearningRate, {"learn_rate_increase_factor": 0.9}),
        (AutoLearningRate, {"learn_rate_adjust_interval": 0}),
        (AutoMinibatchSize, {"minibatch_size_tuning_frequency": 0}),
        (AutoMinibatchSize, {"minibatch_search_criterion_error_margin": -0.1}),
    ],
)
def test_what_is_refused(kind, options):
    with pytest.raises(UserError, match=next(iter(options))):
        kind(**options)


def test_a_shared_clock_asks_seldom():
    """All ranks hear of the seconds at the same step, and ask each other only now and then."""
    now, asked = [0.0], []
    clock = SharedClock(10.0, lambda own: asked.append(own) or [own], lambda: now[0])
    due = []
    for step in range(3500):
        now[0] += 0.01
        if clock.stepped():
            due.append(step + 1)
    assert due == pytest.approx([1000, 2000, 3000], abs=12)
    assert len(asked) < 60
