"""Checks of a state's reshard rules (`parallel_sgd.state.across`).

The rules must be right on these ranks, and after resuming on another number of ranks. The given
algorithm runs in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..array_files import ArrayInMemory
from ..communication import Communicator, simulate
from ..state import wait_for, weight_of
from ..training import Learner
from ..training.checkpoint.compatibility import require_possible
from ..training.state.reshard import leaves, reshard, stripe_sizes
from ..training.state.state_tree import capture, flatten, restore
from .cases import (
    ROUNDING,
    STEPS,
    Array,
    Case,
    Data,
    counts_of,
    data_of,
    difference,
    differs_between_ranks,
    first_of,
    miscounted,
    step,
    trained,
)
from .registry import check

STOPS = (3, 4)
"""Another number of ranks resumes after these minibatches."""

LATER = 4  #: minibatches after resuming


@check(least_ranks=2)
def same_state(case: Case) -> str | None:
    """State declared the same on all ranks has the same bits on all ranks after every step."""
    ranks = range(case.comm.size)
    data = data_of(tuple(tuple((3 * k + 2 * t) % 5 for k in ranks) for t in range(STEPS)))
    learner, problems = case.learner(), []
    for t, parts in enumerate(data):
        step(learner, parts)
        problems.append(_differs_from_rank_0(learner, f"step {t}"))
    return first_of(problems)


@check()
def resharded(case: Case) -> str | None:
    """After resuming on another number of ranks, the shared model, the mean of all models and the
    clock are kept, and training continues to one finite model."""
    learner, kept = case.learner(), []
    for t, parts in enumerate(case.data(max(STOPS)), 1):
        step(learner, parts)
        if t in STOPS:
            kept.append(_saved(learner))
    sent = case.comm.allgather_object([vars(one) for one in kept])
    gathered = [[Saved(**one) for one in remote] for remote in sent]
    if case.comm.rank:  # the resuming ranks are threads of this process
        return None
    size = case.comm.size
    for ranks in (size - 1, size + 1):
        for i, stop in enumerate(STOPS if ranks else ()):
            problem = _problem_on(ranks, case, [remote[i] for remote in gathered], stop)
            if problem:
                return f"stopped after step {stop - 1} and resumed on {ranks} ranks, {problem}"
    return None


@dataclass(frozen=True)
class Saved:
    """The content of one rank's checkpoint, and the shared model at that time."""

    state: dict[str, Any]
    arrays: dict[str, Array]
    weight: int
    samples: int
    shared: Array


def _saved(learner: Learner) -> Saved:
    tree, arrays = flatten(capture(learner))
    weight = weight_of(learner.state)
    return Saved(tree, copy.deepcopy(arrays), weight, learner.samples, _shared_model(learner))


def _problem_on(ranks: int, case: Case, saved: Sequence[Saved], stop: int) -> str | None:
    """Resume on this many ranks, as threads, and describe a problem or return None."""
    data = _data_on(ranks, case.comm.size, stop + LATER)[stop:]

    def body(comm: Communicator) -> str | None:
        learner = _resumed(replace(case, comm=comm), saved)
        kept = _reshard_problem(learner, saved)
        run = trained(learner, data)
        names = [f"step {t}, the shared model" for t in range(stop, stop + len(data))]
        names.append("after finish, the model")
        between = differs_between_ranks(comm, names, [*run.shared, run.final])
        finite = np.isfinite(run.final).all()
        return (
            kept
            or between
            or miscounted(run, data, saved[0].samples)
            or (None if finite else "the final model is not finite")
        )

    try:
        problems = simulate(
            ranks, body, timeout_s=case.timeout_s / 2
        )  # before the other ranks time out
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return next((f"rank {k}: {text}" for k, text in enumerate(problems) if text), None)


def _data_on(ranks: int, before: int, steps: int) -> Data:
    """Return data for this many ranks. Minibatches are no larger than on the ranks before."""
    data = data_of(counts_of(min(ranks, before), steps))
    if ranks <= before:
        return data
    wholes = [np.concatenate(row) for row in data]
    return [[whole[k::ranks] for k in range(ranks)] for whole in wholes]


def _resumed(case: Case, saved: Sequence[Saved]) -> Learner:
    """Create a learner that resumes, as `load_checkpoint` does. Collective."""
    learner = case.learner()
    tree = reshard(
        learner,
        [one.state for one in saved],
        [one.weight for one in saved],
        case.comm.allgather_object(stripe_sizes(learner)),
        lambda rank, name: ArrayInMemory(saved[rank].arrays[name]),
    )
    require_possible(learner, tree, len(saved))
    learner.parameters.flat[...] = np.nan
    restore(learner, tree)
    return learner


def _reshard_problem(learner: Learner, saved: Sequence[Saved]) -> str | None:
    """Describe state lost in resharding, or return None. Collective."""
    local = learner.parameters.flat, weight_of(learner.state)
    models, weights = zip(*learner.comm.allgather_object(local), strict=True)
    before = _mean([one.arrays["parameters"] for one in saved], [one.weight for one in saved])
    rounding = ROUNDING["float32"]
    if learner.samples != saved[0].samples:
        return f"learner.samples is {learner.samples}, not {saved[0].samples}"
    return difference(
        "the shared model, compared with that before", _shared_model(learner), saved[0].shared
    ) or difference(
        "the mean of the models by their weights", _mean(models, weights), before, rounding
    )


def _mean(models: Sequence[Array], weights: Sequence[int]) -> Array:
    mean: Array = np.average(
        np.asarray(models, float), axis=0, weights=weights if any(weights) else None
    )
    return mean


def _shared_model(learner: Learner) -> Array:
    shared: Array = learner.runner.common_model().copy()
    return shared


def _differs_from_rank_0(learner: Learner, when: str) -> str | None:
    """Describe state declared the same, but different from rank 0's, or return None. Collective."""
    wait_for(learner.states)
    local = _declared_same(learner.local_step.state, "optimizer")
    local |= _declared_same(learner.state, "algorithm")
    first = learner.comm.allgather_object(local if learner.comm.rank == 0 else None)[0]
    for name in first | local:
        what = f'{when}, {name}, which is across("same"),'
        local_value, first_value = local.get(name), first.get(name)
        if isinstance(local_value, np.ndarray) and isinstance(first_value, np.ndarray):
            problem = difference(
                f"{what} compared with rank 0's", local_value.ravel(), first_value.ravel()
            )
        elif _shown(local_value) != _shown(first_value):
            problem = f"{what} is {_shown(local_value)}, but {_shown(first_value)} on rank 0"
        else:
            continue
        if problem:
            return problem
    return None


def _declared_same(state: Any, where: str) -> dict[str, Any]:
    """Return the state declared the same on all ranks, by name: arrays, or a `repr`."""
    same = {name: value for name, rule, value in leaves(state, where) if rule == "same"}
    return {name: v if isinstance(v, np.ndarray) else repr(v) for name, v in same.items()}


def _shown(value: Any) -> str:
    return "an array" if isinstance(value, np.ndarray) else str(value)
