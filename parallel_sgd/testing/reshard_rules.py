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
from ..optimizers import SGD
from ..state import Weight, parts_of, wait_for, weight_of
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
    shared_model,
    step,
    trained,
)
from .learning import LATER, SAMPLES, applied, moved_later, stopped
from .registry import check

STOPS = (3, 4)
"""Another number of ranks resumes after these minibatches."""

RESUMED_STEPS = 4  #: minibatches after resuming
FIRST_STOP, LAST_STOP = 4, 9
"""One rank resumes after this many minibatches, inside a block or at its end."""

MOST_RATIO = 1.45  #: of what is applied later on two numbers of ranks


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


@check(least_ranks=2)
def merged(case: Case) -> str | None:
    """Ranks with identical data resume on one rank as if that rank had trained alone, somewhere in
    a block."""
    size, data = case.comm.size, [[row[0]] for row in data_of(counts_of(1, 2 * LAST_STOP))]
    learner, saved = case.learner(case.exact, dtype=case.dtype), []
    for row in data[:LAST_STOP]:
        step(learner, row * size)
        saved.append(case.comm.allgather_object(vars(_saved(learner))))
    learner.finish()
    one_rank = replace(case, algorithm=case.one_rank, comm=Communicator.single())
    alone = trained(one_rank.learner(dtype=case.dtype), data).final
    problems = []
    for stop in range(FIRST_STOP, LAST_STOP + 1):
        sent = saved[stop - 1]
        resumed = _resumed(one_rank, [Saved(**remote) for remote in sent], dtype=case.dtype)
        final = trained(resumed, data[stop:]).final
        what = f"stopped after step {stop - 1} and resumed on 1 rank, the final model"
        problems.append(difference(what, final, alone, case.rounding))
    return None if None in problems else problems[-1]


@check()
def later_resharded(case: Case) -> str | None:
    """Updates left out by few bits are applied after resuming on another number of ranks, too, and
    as much of them."""
    if case.algorithm == case.exact:
        return None
    total, size = SAMPLES * case.comm.size, case.comm.size
    stops, saved, moves = [], [], []
    for algorithm in (case.algorithm, case.exact):
        learner = stopped(case, algorithm)
        saved.append([Saved(**sent) for sent in case.comm.allgather_object(vars(_saved(learner)))])
        stops.append(shared_model(learner).astype(float))
        moves.append(moved_later(learner, total))
        learner.finish()
    left_out = stops[1] - stops[0]
    if float(np.abs(left_out).max()) <= ROUNDING["float32"] or case.comm.rank:
        return None  # the resuming ranks are threads of rank 0's process
    expected = applied(moves[0] - moves[1], left_out)

    def body(comm: Communicator) -> float:
        few, full = (
            moved_later(_resumed(replace(case, algorithm=algorithm, comm=comm), ranks), total)
            for algorithm, ranks in zip((case.algorithm, case.exact), saved, strict=True)
        )
        return applied(few - full, left_out)

    case = replace(case, optimizer=SGD(lr=0.1))
    for ranks in {max(1, size - 1), size + 1} - {size}:
        actual = simulate(ranks, body, timeout_s=case.timeout_s / 2)[0]
        if not expected / MOST_RATIO <= actual <= expected * MOST_RATIO:
            return (
                f"in {LATER} steps without gradients {expected:.3g} of what was left out is "
                f"applied; after resuming on {ranks} ranks {actual:.3g}"
            )
    return None


@dataclass(frozen=True)
class Saved:
    """The content of one rank's checkpoint, and the shared model at that time."""

    state: dict[str, Any]
    arrays: dict[str, Array]
    weight: Weight
    samples: int
    shared: Array


def _saved(learner: Learner) -> Saved:
    tree, arrays = flatten(capture(learner))
    weight = weight_of(learner.state)
    return Saved(tree, copy.deepcopy(arrays), weight, learner.samples, shared_model(learner))


def _problem_on(ranks: int, case: Case, saved: Sequence[Saved], stop: int) -> str | None:
    """Resume on this many ranks, as threads, and describe a problem or return None."""
    data = _data_on(ranks, case.comm.size, stop + RESUMED_STEPS)[stop:]

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


def _resumed(case: Case, saved: Sequence[Saved], dtype: str = "float32") -> Learner:
    """Create a learner that resumes, as `load_checkpoint` does. Collective."""
    learner = case.learner(dtype=dtype)
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
        "the shared model, compared with that before",
        shared_model(learner),
        saved[0].shared,
        0.0 if learner.algorithm.has_common_model else rounding,
    ) or difference(
        "the mean of the models by their weights", _mean(models, weights), before, rounding
    )


def _mean(models: Sequence[Array], weights: Sequence[Weight]) -> Array:
    """Return the mean of models [n] by their weights, in each part of the model."""
    values, means, begin = np.asarray(models, float), list[Array](), 0
    parts = [parts_of(one, values.shape[1]) for one in weights]
    for end in parts[0]:
        own = [one[end] for one in parts]
        part = values[:, begin:end]
        means.append(np.average(part, axis=0, weights=own if any(own) else None))
        begin = end
    return np.concatenate(means)


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
