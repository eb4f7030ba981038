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
    shared_model,
    shifted,
    step_with,
    trained,
)
from .registry import check

FAR = 4.0  #: from the start to the centres, far more than between the samples
NEARER = 0.95  #: largest fraction of that distance left

SAMPLES = 2  #: of each rank in a minibatch
PAUSE = 12  #: steps without a gradient
MOST_PAUSES = 12  #: most pauses until the model stands still, in full precision
STILL = 1e-5  #: largest movement in a pause of a model that stands still
TOGETHER = 0.05  #: largest fraction of the distance between ranks left after some steps
LATER = 24  #: steps without gradients until what has been left out counts as applied
STOP = 6  #: minibatches before
ALONG = 0.2  #: least cosine of the angle between what is left out and what is applied later
MOST_APPLIED = 1.5  #: largest part of what is left out that is applied later
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


@check(least_ranks=3)
def approach(case: Case) -> str | None:
    """In steps without gradients the ranks' own models approach each other, to a twentieth of
    their distance within 24 minibatches. Without a common model, the mean of all models stays."""
    learner = case.learner(case.exact, dtype=case.dtype, optimizer=SGD(lr=0.1))
    total = SAMPLES * case.comm.size
    for row in _gradients(case, 3):
        step_with(learner, row, total)
    before = case.comm.allgather_object(learner.parameters.flat.astype(float))
    for _ in range(LATER):
        step_with(learner, None, total)
    after = case.comm.allgather_object(learner.parameters.flat.astype(float))
    learner.finish()
    apart, still_apart = (
        float(np.abs(models - np.mean(models, axis=0)).max()) for models in (before, after)
    )
    if still_apart > max(TOGETHER * apart, case.rounding):
        return (
            f"the ranks' own models are up to {apart:.3g} from their mean, and still "
            f"{still_apart:.3g} after {LATER} minibatches without gradients, not at most "
            f"{TOGETHER} of that"
        )
    if case.algorithm.has_common_model:
        return None
    what = f"the mean of the ranks' models after {LATER} minibatches without gradients"
    return difference(what, np.mean(after, axis=0), np.mean(before, axis=0), case.rounding)


@check()
def later(case: Case) -> str | None:
    """Updates left out by few bits are applied in later steps: in steps without gradients the model
    moves towards the model in full precision."""
    if case.algorithm == case.exact:
        return None
    learners = stopped(case, case.algorithm), stopped(case, case.exact)
    left_out = shared_model(learners[1]).astype(float) - shared_model(learners[0])
    few, full = (moved_later(learner, SAMPLES * case.comm.size) for learner in learners)
    for learner in learners:
        learner.finish()
    if float(np.abs(left_out).max()) <= ROUNDING["float32"]:
        return None
    moved = few - full
    length = float(np.linalg.norm(moved))
    cosine = float(moved @ left_out) / max(length * float(np.linalg.norm(left_out)), 1e-30)
    gain = applied(moved, left_out)
    if cosine >= ALONG and gain <= MOST_APPLIED:
        return None
    return (
        f"{np.linalg.norm(left_out):.3g} from the model in full precision, the model moves by "
        f"{length:.3g} in {LATER} minibatches without gradients, of which {gain:.3g} times "
        f"that distance, not {ALONG * length / np.linalg.norm(left_out):.3g} to {MOST_APPLIED}"
    )


def stopped(case: Case, algorithm: Algorithm[Any]) -> Learner:
    """Create a learner that has trained for a few minibatches, with gradients that do not depend on
    the model. Collective."""
    learner = case.learner(algorithm, optimizer=SGD(lr=0.1))
    for row in _gradients(case, 4)[:STOP]:
        step_with(learner, row, SAMPLES * case.comm.size)
    return learner


def moved_later(learner: Learner, total: int) -> Array:
    """Return the displacement [n] of the shared model in steps without gradients. Collective.

    Args:
        total: number of samples of a minibatch.
    """
    before = shared_model(learner).astype(float)
    for _ in range(LATER):
        step_with(learner, None, total)
    displacement: Array = shared_model(learner) - before
    return displacement


def applied(moved: Array, left_out: Array) -> float:
    """Return the part of what has been left out [n] that a displacement [n] makes up for."""
    return float(moved @ left_out) / float(left_out @ left_out)


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
    total = SAMPLES * case.comm.size

    def displaced() -> Array:
        displacement: Array = shared_model(learner).astype(float) - start
        return displacement

    for row in gradients:
        step_with(learner, row, total)
    paused = 0
    while paused < (MOST_PAUSES if pauses is None else pauses):
        before = displaced()
        for _ in range(PAUSE):
            step_with(learner, None, total)
        moved = max(case.comm.allgather_object(float(np.abs(displaced() - before).max())))
        if pauses is None and moved <= STILL:
            break
        paused += 1
    displacement = Displacement(displaced(), _declared(learner))
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
