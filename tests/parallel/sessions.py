"""Small sessions, and the loop of one's own that each of them must equal."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import numpy as np

import parallel_sgd as psgd
from parallel_sgd.data import Arrays, Source

SAMPLES, TESTED, SIZE = 60, 7, 12


def data(samples: int = SAMPLES, seed: int = 0) -> Arrays:
    """Samples in three classes, which a linear model can learn most of."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((samples, 4))
    noise = random.standard_normal((samples, 3))
    return Arrays(x.astype(np.float32), (2 * x[:, :3] + noise).argmax(axis=1))


def model(dtype: Any = np.float64) -> psgd.models.MLP:
    return psgd.models.MLP([4, 8, 3], seed=1, dtype=dtype)


@contextmanager
def learner_of(comm, own, algorithm=None, optimizer=None):
    algorithm = algorithm or psgd.DataParallelSGD()
    with psgd.Learner(own.parameters, optimizer or psgd.SGD(lr=0.2), algorithm, comm) as learner:
        yield learner


def trained(comm, algorithm=None, optimizer=None, *, dtype=np.float64, **options: Any):
    """The parameters and the rows of a session."""
    own = model(dtype)
    options = {"train": data(), "minibatch_size": SIZE, "epochs": 3} | options
    with learner_of(comm, own, algorithm, optimizer) as learner:
        rows = psgd.TrainingSession(learner=learner, objective=own, **options).run()
    return own.parameters.flat.copy(), rows


def looped(comm, algorithm=None, optimizer=None, *, dtype=np.float64, rates=None, **options: Any):
    """The parameters after a loop of one's own.

    Args:
        rates: of the learner's samples, what to multiply the learning rate by.
    """
    own = model(dtype)
    options = {"minibatch_size": SIZE, "epochs": 3} | options
    with learner_of(comm, own, algorithm, optimizer) as learner:
        for x, y in Source(data(), dtype=dtype, classes=3, **options).minibatches(learner):
            if rates:
                learner.local_step.state.lr_factor = rates(learner.samples)
            own.gradient(x, y, out=learner.gradient)
            learner.step(samples=len(x))
        learner.finish()
    return own.parameters.flat.copy()


def without_seconds(rows):
    """Rows as dictionaries, but for how long they took."""
    kept = [row.as_dict() for row in rows]
    return [{name: row[name] for name in row if name not in ("seconds", "details")} for row in kept]
