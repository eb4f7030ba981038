"""Faults in what is left out that the tests must notice: see `mutations`."""

from __future__ import annotations

import numpy as np
from mutations import Mutation, nothing

from parallel_sgd import DataParallelASGD, DataParallelSGD
from parallel_sgd.algorithms import LocalUpdates, SavedOptimizer, Skipped
from parallel_sgd.communication import phrases
from parallel_sgd.exchange import OverlappedExchange
from parallel_sgd.training.runner import AlgorithmRunner

MINIBATCHES = [f"left out, {name}" for name in ("1 bit", "double buffering")]


def trains_the_others(right, self, state, work, samples):
    """The rank with the bad numbers gives nothing, and does so alone."""
    problem = right(self, state, work, samples)
    if problem:
        work.gradient.flat[...] = 0
    return None


def goes_on_from_its_model(right, self, state, work):
    own = work.parameters.flat + np.float32(1)
    steps = right(self, state, work)
    work.parameters.flat[...] = own
    return steps


def stands_still(right, self, samples, total):
    before = self.work.samples
    total = right(self, samples, total)
    self.work.optimizer.state.samples = before
    return total


def never_in_a_row(right, self, *what):
    right(self, *what)


def counts_all(right, self, *what):
    self._ended_at = what[-2]
    return right(self, *what)


def pushes_everything(right, self, state, work, vector, bits):
    np.nan_to_num(vector, copy=False, nan=0.0, posinf=1.0, neginf=-1.0)
    return True


def blames_the_first(right, groups):
    return right([[0], [1, 2]])


LEFT_OUT_MUTATIONS = [
    Mutation(
        "one rank leaves out alone", DataParallelSGD, "problem", trains_the_others, MINIBATCHES
    ),
    Mutation(
        "residuals as the exchange left them",
        OverlappedExchange,
        "_copy_residuals",
        nothing,
        ["left out, overlap", "left out, conservation"],
    ),
    Mutation("the clock stands", AlgorithmRunner, "skip", stands_still, MINIBATCHES),
    Mutation(
        "momenta as they are",
        SavedOptimizer,
        "restore",
        nothing,
        ["left out, blocks, keep", "left out, common model", "left out, push"],
    ),
    Mutation(
        "not the block's beginning",
        LocalUpdates,
        "skip",
        goes_on_from_its_model,
        ["left out, blocks", "left out, common model"],
    ),
    Mutation("a loss not looked at", Skipped, "check_loss", nothing, ["left out, loss"]),
    Mutation("never too often", Skipped, "count", never_in_a_row, ["left out, in a row"]),
    Mutation("all count as a row", Skipped, "count", counts_all, ["left out, in a row"]),
    Mutation(
        "a push of what is not finite",
        DataParallelASGD,
        "_can_push",
        pushes_everything,
        ["left out, push"],
    ),
    Mutation("another rank named", phrases, "odd_one_out", blames_the_first, ["odd one out"]),
]
