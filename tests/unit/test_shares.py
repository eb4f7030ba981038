"""The division of a minibatch among ranks by shares."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_sgd import UserError
from parallel_sgd.data.shares import (
    checked_shares,
    parts,
    read_shares,
    shares_after,
    weights_of,
)


@given(st.integers(0, 1000), st.lists(st.integers(1, 1000), min_size=1, max_size=9))
def test_parts_are_as_near_to_the_shares_as_whole_numbers_can_be(samples, weights):
    ends = parts(samples, tuple(weights))
    counts = np.diff(ends)
    assert ends[0] == 0 and ends[-1] == samples
    assert (abs(counts - samples * np.array(weights) / sum(weights)) < 1).all()


@given(st.integers(0, 1000), st.integers(1, 9))
def test_equal_shares_differ_by_one_at_most_and_larger_parts_come_first(samples, ranks):
    counts = [end - begin for begin, end in pairwise(parts(samples, (7,) * ranks))]
    least, more = divmod(samples, ranks)
    assert counts == [least + 1] * more + [least] * (ranks - more)


def test_only_ratios_count():
    assert checked_shares([0.5, 1.5, 3]) == checked_shares([1, 3, 6]) == {0: (1, 3, 6)}
    assert checked_shares(np.array([2.0, 4.0])) == {0: (1, 2)}
    by_samples = checked_shares({0: [1, 1], 640: [1, 3]})
    assert checked_shares(by_samples) == by_samples
    assert [shares_after(by_samples, samples) for samples in (0, 639, 640)] == [
        (1, 1),
        (1, 1),
        (1, 3),
    ]
    assert checked_shares(read_shares("1,0.25")) == {0: (4, 1)}
    assert read_shares("measured") == checked_shares("measured") == "measured"
    assert checked_shares(None) is None


def test_ranks_keep_their_shares_when_others_fail_or_join():
    assert weights_of([0, 1, 2], (5, 1, 3)) == (5, 1, 3)
    assert weights_of([0, 2], (5, 1, 3)) == (5, 3)
    assert weights_of([2, 3], (5, 1, 3)) == (3, 3)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([1, 0], r"shares\[1\]=0 must be more than 0"),
        ([1, -2], r"shares\[1\]=-2 must be a finite number, at least 0"),
        ([1, float("inf")], r"shares\[1\]=inf must be a finite number"),
        ([], r"shares=\[\] must have a number for each rank"),
        ("fast", "shares='fast' must be 'measured', or a positive number for each rank"),
        (3, "shares=3 must be 'measured', or a positive number for each rank: it is an int"),
        ({5: [1, 1]}, r"shares=\{5: \[1, 1\]\} must begin at 0 samples"),
        ({0: [1, "x"]}, r"shares\[0\]\[1\]='x' must be a finite number"),
    ],
)
def test_what_is_no_share_is_refused(shares, message):
    with pytest.raises(UserError, match=f"^{message}"):
        checked_shares(shares)


def test_text_that_is_no_share_is_refused():
    with pytest.raises(UserError, match=r"^shares='1,x' must be measured, or numbers as 1,0\.5"):
        read_shares("1,x")
