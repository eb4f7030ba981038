"""Checks of identities from the equations: compare the results of two runs.

The runs are in full precision, and the identities hold to rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..algorithms import Algorithm
from ..communication import Communicator
from ..optimizers import SGD
from .cases import (
    LENGTHS,
    ROUNDING,
    STEPS,
    Case,
    counts_of,
    data_of,
    difference,
    first_of,
    put_gradient,
    shifted,
    trained,
)
from .registry import check

SOME = 0.1  #: fraction of values: a message may hold 1 of 32, in 10 minibatches


@check(alone=True)
def serial(case: Case) -> str | None:
    """One rank trains as the optimizer does without any algorithm."""
    return first_of([_serial(case, steps) for steps in LENGTHS])


def _serial(case: Case, steps: int) -> str | None:
    one = Communicator.single()
    data = data_of(counts_of(1, steps))
    run = case.exact_run(data, comm=one)
    # The optimizer alone, on a learner's parameters and gradient. The algorithm never runs.
    alone = case.learner(case.exact, dtype=case.dtype, comm=one)
    local_step = case.optimizer.bind(alone.parameters)
    for (samples,) in data:
        put_gradient(alone, samples)
        local_step(alone.gradient.flat, len(samples))
    what = f"after finish in step {steps}, the model"
    return difference(what, run.final, alone.parameters.flat, case.rounding)


@check(least_ranks=2)
def identical(case: Case) -> str | None:
    """Ranks with identical data train as one rank with that data, at the same rates."""
    data = [[row[0]] for row in data_of(counts_of(1))]
    many = case.exact_run([row * case.comm.size for row in data])
    alone = case.learner(case.one_rank, dtype=case.dtype, comm=Communicator.single())
    one = trained(alone, data)
    for t, (actual, expected) in enumerate(zip(many.shared, one.shared, strict=True)):
        if problem := difference(f"step {t}, the shared model", actual, expected, case.rounding):
            return problem
    return difference("after finish, the model", many.final, one.final, case.rounding)


@check(least_ranks=2)
def permuted(case: Case) -> str | None:
    """Ranks end with the same model after an exchange of their data."""
    data = case.data()
    run = case.exact_run(data)
    turned = case.exact_run([[*row[1:], row[0]] for row in data])
    return difference("after finish, the model", turned.final, run.final, case.rounding)


@check(least_ranks=2)
def communication(case: Case) -> str | None:
    """Every rank's data count in every value of every rank's final model.

    With few bits they count in some of the values, since small changes may be lost for a while.
    """
    problems = [_influence_problem(case, case.exact, case.dtype, 1.0)]
    if case.algorithm != case.exact:
        problems.append(_influence_problem(case, case.algorithm, "float32", SOME))
    return first_of(problems)


def _influence_problem(
    case: Case, algorithm: Algorithm[Any], dtype: str, least: float
) -> str | None:
    """Name a rank whose data count in too few values of this rank's final model. Collective.

    Args:
        least: least fraction of the values.
    """
    run = trained(case.learner(algorithm, dtype=dtype), case.data())
    problems = []
    for k in range(case.comm.size):
        changed = trained(case.learner(algorithm, dtype=dtype), shifted(case.data(), [k]))
        idle = np.flatnonzero(np.abs(changed.final - run.final) <= ROUNDING[dtype])
        if len(idle) > (1 - least) * run.final.size:
            problems.append(
                f"different data on rank {k} did not change {len(idle)} of {run.final.size} "
                f"values of this rank's final model, the first of them value {idle[0]}: "
                f"{run.final[idle[0]]:.9g}"
            )
    return first_of(problems)


@check(least_ranks=2)
def weights(case: Case) -> str | None:
    """A rank counts by its samples: shifting its data by d moves the model by n_k / N of the effect
    of shifting all data by d. A rank without samples counts nothing.
    With one stiffness and plain SGD the final model is linear in the data. Both runs have equally
    many samples in every minibatch. In the first run every rank has the same number."""
    size = case.comm.size
    uneven = [0, *range(1, size - 1)]
    uneven.append(2 * size - sum(uneven))
    even = data_of(((2,) * size,) * STEPS, one_stiffness=True)
    data = data_of((tuple(uneven),) * STEPS, one_stiffness=True)
    rule = SGD(lr=0.1)
    run = case.exact_run(even, optimizer=rule)
    full_shift = case.exact_run(shifted(even, range(size)), optimizer=rule).final - run.final
    run = case.exact_run(data, optimizer=rule)
    problems = []
    for k in range(1, size):
        moved = case.exact_run(shifted(data, [k]), optimizer=rule).final - run.final
        share = uneven[k] / sum(uneven)
        what = f"the final model's answer to rank {k}, with {uneven[k]} of {sum(uneven)} samples"
        problems.append(difference(what, moved, share * full_shift, case.rounding))
    return first_of(problems)


@check()
def float64(case: Case) -> str | None:
    """float64 parameters are trained in float64."""
    run = trained(case.learner(case.exact, dtype="float64"), case.data())
    if run.final.dtype != np.float64:
        return f"after finish, the model is {run.final.dtype}"
    coarse = run.final.astype(np.float32)
    if np.array_equal(coarse, run.final):
        return "the final model has only the precision of float32"
    single = trained(case.learner(case.exact), case.data())
    return difference("after finish, compared with float32's model", single.final, coarse, 1e-4)
