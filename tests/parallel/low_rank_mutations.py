"""Faults of PowerSGD that the tests must notice: see `mutations`."""

from __future__ import annotations

import numpy as np
from mutations import Mutation, nothing

from parallel_sgd.algorithms import PowerSGD, low_rank
from parallel_sgd.exchange import Exchange

PAPER, CONSERVATION, EXACT = (
    f"PowerSGD, {name}" for name in ("the paper", "conservation", "exact")
)


def forgets_error(right, self, state, work, minibatch):
    right(self, state, work, minibatch)
    state.error.fill(0)


def divides_error(right, self, state, work, minibatch):
    right(self, state, work, minibatch)
    state.error /= work.comm.size


def error_beside_the_mean(right, self, state, work, minibatch):
    """The paper's, in which the ranks' own differences stay."""
    before = state.error + work.gradient.flat
    right(self, state, work, minibatch)
    state.error[:] = before - work.gradient.flat / work.comm.size


def begins_anew(right, self, state, work, minibatch):
    right(self, state, work, minibatch)
    state.q[:] = np.random.default_rng(5).uniform(-1, 1, state.q.size)


def keeps_what_depends(right, row, others, smallest):
    if not right(row, others, smallest):
        row[:] = 0
    return True


def the_same_in_every_step(right, p, samples, number):
    right(p, 0, number)


def not_compressed_is_lost(right, self, state, work, minibatch):
    before = work.parameters["b"].copy() if "b" in work.parameters else 0
    right(self, state, work, minibatch)
    if "b" in work.parameters:
        work.parameters["b"] = before


LOW_RANK_MUTATIONS = [
    Mutation("no exchange", Exchange, "sum", nothing, [PAPER, CONSERVATION, EXACT]),
    Mutation("error forgotten", PowerSGD, "step", forgets_error, [PAPER, CONSERVATION]),
    Mutation("error divided by ranks", PowerSGD, "step", divides_error, [PAPER, CONSERVATION]),
    Mutation(
        "error beside the mean",
        PowerSGD,
        "step",
        error_beside_the_mean,
        ["PowerSGD, small errors"],
    ),
    Mutation("no warm start", PowerSGD, "step", begins_anew, [PAPER]),
    Mutation("a vector lost", PowerSGD, "step", not_compressed_is_lost, [PAPER, CONSERVATION]),
    Mutation("P not orthonormal", low_rank, "orthonormalize", nothing, [PAPER, EXACT]),
    Mutation("Q not scaled", low_rank, "scale", nothing, ["PowerSGD, tiny"]),
    Mutation(
        "a dependent column kept",
        low_rank,
        "_made_orthonormal",
        keeps_what_depends,
        ["PowerSGD, all found"],
    ),
    Mutation(
        "the same replacement in every step",
        low_rank,
        "orthonormalize",
        the_same_in_every_step,
        ["PowerSGD, replaced columns"],
    ),
]
