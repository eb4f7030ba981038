"""PowerSGD, on ranks whose data differ."""

from __future__ import annotations

import numpy as np
import pytest
from cases import GATHERS
from invariants import same_bits
from low_rank import (
    LAYOUT,
    MATRICES,
    SCALES,
    SCALES64,
    VALUES,
    conserves,
    equals_the_paper,
    finds_all,
    goes_on_with_other_ranks,
    is_exact_at_low_rank,
    keeps_errors_small,
    learner_of,
    replaces_anew,
    train,
)

from parallel_sgd import DataParallelSGD, Learner
from parallel_sgd.algorithms.low_rank import orthonormalize

pytestmark = pytest.mark.messages


def test_every_update_is_the_papers(comm):
    equals_the_paper(comm)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rank", [1, 2])
def test_nothing_is_lost(comm, rank, scale):
    conserves(comm, rank, scale)


@pytest.mark.parametrize("scale", SCALES64)
@pytest.mark.parametrize("rank", [2, 3])
def test_a_sum_of_that_rank_is_exact(comm, rank, scale):
    is_exact_at_low_rank(comm, rank, scale)


def test_no_gradient_is_overlooked_for_ever(comm):
    finds_all(comm)


def test_columns_are_replaced_by_others_in_every_step(comm):
    replaces_anew(comm)


@pytest.mark.parametrize(("left", "depends"), [(2.0**-18, False), (2.0**-20, True)])
def test_a_column_depends_where_no_more_than_rounding_is_left(left, depends):
    """16 units of it, which are 2**-19."""
    p = np.zeros((2, 5), np.float32)
    p[:, 0], p[1, 1] = 1, left
    orthonormalize(p, 3)
    assert np.array_equal(p[0], np.eye(5)[0])
    assert np.allclose(p[1], np.eye(5)[1]) == (not depends)
    assert np.allclose(p @ p.T, np.eye(2), atol=1e-6)


def test_errors_of_ranks_that_differ(comm):
    keeps_errors_small(comm)


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 3), (4, 1)])
@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_a_checkpoint_on_other_ranks(old, new, tmp_path):
    goes_on_with_other_ranks(old, new, tmp_path)


@pytest.mark.parametrize("rank", [1, 2])
def test_bytes_sent(comm, rank):
    """Two sums of 32-bit values: all P and what is not compressed; all Q."""
    learner = learner_of(comm, rank, transport="pipelined")
    train(learner, 0)
    sizes = [rank * (a + b) for a, b in MATRICES.values()]
    raw = VALUES - sum(a * b for a, b in MATRICES.values())
    expected = 2 * (comm.size - 1) * 4 * (sum(sizes) + raw)
    assert sum(comm.allgather_object(learner.bytes_sent)) == expected


def test_a_rank_that_saves_nothing_is_full_precision(comm):
    learner = learner_of(comm, 50)
    other = Learner(learner.parameters.like(), GATHERS, DataParallelSGD(), comm)
    for step in range(3):
        train(learner, step)
        train(other, step)
    assert list(learner.parameters) == list(LAYOUT)
    assert same_bits(learner.parameters.flat, other.parameters.flat)
    assert learner.bytes_sent == other.bytes_sent
    assert np.abs(other.parameters.flat).min() > 0
