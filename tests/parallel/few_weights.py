"""Learners of two weights, on numbers that say whose they are."""

from __future__ import annotations

import numpy as np
import pytest

import parallel_sgd as psgd
from parallel_sgd.errors import UserError

ALGORITHMS = {
    "data-parallel": psgd.DataParallelSGD(),
    "1 bit": psgd.DataParallelSGD(gradient_bits=1, overlap=True),
    "blocks": psgd.ModelAveragingSGD(sync_steps=2),
    "overlap": psgd.BlockMomentumSGD(sync_steps=2, overlap_samples=1000),
}
by_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


def learner_of(comm, algorithm=ALGORITHMS["data-parallel"], **options):
    parameters = psgd.Parameters({"w": np.zeros(2, np.float32)})
    return psgd.Learner(parameters, psgd.SGD(lr=0.01), algorithm, comm, **options)


def numbered(samples, rank=0):
    y = 100 * rank + np.arange(samples)
    return np.stack([y, -y], 1).astype(np.float32), y


def last(comm):
    return comm.rank == comm.size - 1


def put(learner, *minibatches):
    learner.gradient.flat[:] = sum(x.sum(axis=0) for x, _ in minibatches)
    return sum(len(x) for x, _ in minibatches)


def errors_of(on_ranks, body):
    """The message that all ranks raise alike, None where none does, and how many they are."""

    def caught(comm):
        try:
            body(comm)
        except UserError as error:
            return str(error)
        return None

    messages = on_ranks(caught)
    assert len(set(messages)) == 1
    return messages[0], len(messages)


def named(ranks):
    """As messages name ranks: "rank 0", "ranks 0, 1"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def disagreement(fact, size, usual, other):
    """The message where the last rank has another value; None where it is the only one."""
    if size == 1:
        return None
    has = f"{named(range(size - 1))}: {usual}; rank {size - 1}: {other}"
    return f"{fact} must be the same on all ranks, but differs: {has}"
