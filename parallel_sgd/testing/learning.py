"""Checks of learning: every gradient counts once, sooner or later, and lowers the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..algorithms import Algorithm
from ..communication import Communicator
from ..optimizers import SGD
from ..state import wait_for
from ..training import Learner
from ..training.state.reshard import leaves
from .cases import (
    ROUNDING,
    STEPS,
    VALUES,
    Array,
    Case,
    Data,
    counts_of,
    data_of,
    difference,
    first_of,
    shifted,
    trained,
)
from .registry import check

FAR = 4.0  #: from the start to the centres, far more than between the samples
NEARER = 0.95  #: largest fraction of that distance left

SAMPLES = 2  #: of each rank in a minibatch
PAUSE = 12  #: steps without a gradient
MOST_PAUSES = 12  #: most pauses until the model stands still, in full precision
STILL = 1e-5  #: largest movement in a pause of a model that stands still
EXPLAINED = 0.1  #: fraction of a difference: the rest changes while the model moves


@check()
def learns(case: Case) -> str | None:
    """Training approaches the minimum of the loss, wherever it is."""
    problems = []
    for side in (FAR, -FAR):
        data = shifted(case.data(), range(case.comm.size), by=side)
        learner = case.learner()
        optimum = _optimum(data)
        before = float(np.linalg.norm(learner.parameters.flat - optimum))
        after = float(np.linalg.norm(trained(learner, data).final - optimum))
        if not after <= NEARER * before:
            problems.append(
                f"after {STEPS} minibatches the model is {after / before:.3g} times as far from "
                f"the minimum of the loss as at the start, {side:+g} away, not at most {NEARER}"
            )
    return first_of(problems)


def _optimum(data: Data) -> Array:
    samples = np.concatenate([part for row in data for part in row])
    stiffness, centres = samples.swapaxes(0, 1)
    optimum: Array = (stiffness * centres).sum(axis=0) / stiffness.sum(axis=0)
    return optimum


@check(least_ranks=2)
def dry_ranks_count_nothing(case: Case) -> str | None:
    """With all samples on one rank, all ranks train as that rank does alone."""
    size, problems = case.comm.size, []
    data = [row[0] for row in data_of(counts_of(1))]
    alone = case.learner(case.one_rank, dtype=case.dtype, comm=Communicator.single())
    expected = trained(alone, [[part] for part in data]).final
    for rank in (0, size - 1):
        rows = [[part if k == rank else part[:0] for k in range(size)] for part in data]
        final = case.exact_run(rows).final
        what = f"the final model with all samples on rank {rank}, compared with a single rank"
        problems.append(difference(what, final, expected, case.rounding))
    return first_of(problems)


@check()
def owed(case: Case) -> str | None:
    """The applied updates and the declared sums of the states add up to all gradients.

    The gradients do not depend on the model, and steps without gradients follow. The displacement
    of the model is then linear in the gradients. It equals the displacement in full precision,
    except for a multiple of the rest declared by the states.
    """
    gradients = _gradients(case, 1), _gradients(case, 2)
    both = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(*gradients, strict=True)]
    exact, pauses = _displacement(case, case.exact, both, None)
    first, second, whole = (
        _displacement(case, case.algorithm, g, pauses)[0] for g in (*gradients, both)
    )
    rounding = ROUNDING["float32"] * (1 + float(np.abs(exact.applied).max()))
    apart = whole.minus(first).minus(second)
    beside = whole.minus(exact)
    return first_of(
        [
            apart.problem(
                "with the sum of two gradients, compared with the sum of both displacements",
                rounding,
            ),
            beside.problem("compared with full precision", rounding),
        ]
    )


@dataclass(frozen=True)
class Displacement:
    """The displacement of the shared model.

    Attributes:
        applied: the displacement, [n].
        pending: the rest declared by the ranks' states, [2, n]; the second row has the stripes of a
            dictionary in reverse order.
    """

    applied: Array
    pending: Array

    def minus(self, other: Displacement) -> Displacement:
        return Displacement(self.applied - other.applied, self.pending - other.pending)

    def problem(self, what: str, rounding: float) -> str | None:
        """Describe a difference between displacements beyond the declared rest, or return None.

        Args:
            rounding: of the displacements.
        """
        size = float(np.abs(self.applied).max())
        if size <= rounding:
            return None
        rests = [float(np.abs(_rest(self.applied, pending)).max()) for pending in self.pending]
        if min(rests) <= rounding + EXPLAINED * size:
            return None
        return (
            f"the displacement of the model {what}, differs by up to {size:.3g}; without the rest "
            f'that the state holds in fields across("sum") or across("stripe"), by '
            f"{min(rests):.3g}"
        )


def _rest(applied: Array, pending: Array) -> Array:
    """Return the part of a displacement that is not a multiple of the rest still to be applied."""
    rate = float(applied @ pending) / max(float(pending @ pending), 1e-30)
    rest: Array = applied - max(rate, 0.0) * pending
    return rest


def _gradients(case: Case, number: int) -> list[list[Array]]:
    """Return gradients [n] by minibatch and rank. Each is the sum over some samples."""
    random = np.random.default_rng([13, number])
    ranks = range(case.comm.size)
    return [[random.standard_normal(VALUES) for _ in ranks] for _ in range(STEPS)]


def _displacement(
    case: Case, algorithm: Algorithm[Any], gradients: Sequence[Sequence[Array]], pauses: int | None
) -> tuple[Displacement, int]:
    """Train with these gradients, and then without gradients. Collective.

    Args:
        pauses: number of pauses without gradients. None: until the model stands still.
    Returns:
        The displacement, and the number of pauses.
    """
    learner = case.learner(algorithm, optimizer=SGD(lr=0.1))
    start = learner.parameters.flat.astype(float)

    def step(gradient: Array | float) -> None:
        samples = SAMPLES if learner.distributed else SAMPLES * case.comm.size
        learner.announce(samples, SAMPLES * case.comm.size)
        learner.gradient.flat[...] = gradient
        learner.step(samples=samples)

    def applied() -> Array:
        displacement: Array = learner.runner.common_model().astype(float) - start
        return displacement

    for row in gradients:
        step(row[case.comm.rank] if learner.distributed else np.sum(row, axis=0))
    paused = 0
    while paused < (MOST_PAUSES if pauses is None else pauses):
        before = applied()
        for _ in range(PAUSE):
            step(0.0)
        moved = max(case.comm.allgather_object(float(np.abs(applied() - before).max())))
        if pauses is None and moved <= STILL:
            break
        paused += 1
    displacement = Displacement(applied(), _declared(learner))
    learner.finish()
    return displacement, paused


def _declared(learner: Learner) -> Array:
    """Return the sums declared by all ranks' states: see `Displacement.pending`. Collective."""
    sums, stripes = np.zeros(VALUES), dict[str, Array]()
    wait_for(learner.states)
    for name, rule, value in leaves(learner.state, "algorithm"):
        if rule == "sum" and isinstance(value, np.ndarray) and value.shape == (VALUES,):
            sums += value
        elif rule == "stripe" and isinstance(value, np.ndarray):
            stripes[name] = value
    gathered = learner.comm.allgather_object((sums, stripes))
    total: Array = np.sum([remote for remote, _ in gathered], axis=0)
    buckets = [np.concatenate([remote[name] for _, remote in gathered]) for name in stripes]
    if sum(map(len, buckets)) != VALUES:
        buckets = [np.zeros(VALUES)]
    ordered: Array = np.stack([np.concatenate(buckets), np.concatenate(buckets[::-1])])
    ordered += total
    return ordered
