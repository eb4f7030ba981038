"""Learners of parameter servers whose workers have several ranks, and their training."""

from __future__ import annotations

import numpy as np
from invariants import same_bits
from served_training import (
    asynchronous,
    few_samples_of,
    put_gradient,
    starting_point,
)

from parallel_sgd import (
    SGD,
    Learner,
    MomentumSGD,
)

RANKS = 5  #: four that train, and a server
PLAIN, MOMENTUM = SGD(lr=0.1), MomentumSGD(lr=0.1)


def learner_of(comm, ranks_per_worker, optimizer=PLAIN, dtype=np.float64, **options):
    options = {"servers": 1, **options}
    algorithm = asynchronous(ranks_per_worker=ranks_per_worker, **options)
    return Learner(starting_point(dtype), optimizer, algorithm, comm)


def same_within(learner):
    """The ranks of a worker hold the same bits."""
    within = learner.group.within
    models = (
        [learner.parameters.flat]
        if within is None
        else within.allgather_object(learner.parameters.flat.copy())
    )
    assert all(same_bits(models[0], model) for model in models)


def train(learner, steps=8, *, told=True):
    """Train on different data on every rank. Return the model after every step."""
    models = []
    for step in range(0 if learner.serves else steps):
        samples = [few_samples_of(k, step) for k in range(learner.comm.size)]
        own = samples[learner.comm.rank]
        if told:
            learner.announce(own, sum(samples))
        put_gradient(learner, step, own)
        learner.step(samples=own)
        same_within(learner)
        models.append(learner.parameters.flat.copy())
    return models
