"""Checks of an algorithm's conduct: equal bits on all ranks and in every run.

Every run ends, also with dry ranks. The given algorithm runs in float32.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np

from ..communication import Communicator
from ..data import RankSource
from ..schedules import Steps
from ..state import wait_for, weight_of
from ..training import Learner
from ..training.state.state_tree import capture, flatten, restore, unflatten
from .cases import (
    LENGTHS,
    STEPS,
    VALUES,
    Array,
    Case,
    Run,
    data_of,
    difference,
    differs_between_ranks,
    first_difference,
    first_of,
    miscounted,
    put_gradient,
    step,
    trained,
)
from .exploration.explore import Outcome, ScheduleFailed, explore
from .registry import check

EXPLORED = 5  #: minibatches of a run in one of many orders
AT_A_TIME = 10  #: orders
STOPS = 8
"""Minibatches of the resumed run. The run is stopped before each minibatch, and at the end."""

DRY = 4  #: rank 0 has no samples from this minibatch on
EMPTY = 6  #: no rank has samples in this minibatch
FASTER, FACTOR = 4, 3.0  #: from this minibatch on the learning rate is this much higher
SEPARATE = (17, 5, 0, 9)  #: samples of ranks 0, 1, ... with separate data


@check()
def agreement(case: Case) -> str | None:
    """All ranks have the same shared model after every step, and the same model at the end."""
    problems = []
    for steps in LENGTHS:
        learner, data = case.learner(), case.data(steps)
        run = trained(learner, data)
        learner.finish()
        second = difference("the model after finishing twice", learner.parameters.flat, run.final)
        names = [f"step {t}, the shared model" for t in range(len(run.shared))]
        names.append(f"after finish in step {steps}, the model")
        between = differs_between_ranks(case.comm, names, [*run.shared, run.final])
        problems.append(between or miscounted(run, data) or second)
    return first_of(problems)


@check()
def dry_ranks(case: Case) -> str | None:
    """Ranks with few or no samples delay no rank, and every sample is counted once."""
    size = case.comm.size
    counts = [[(k + t) % 3 for k in range(size)] for t in range(STEPS)]
    for t in range(STEPS):
        counts[t][-1] = 0 if size > 1 else 1
        counts[t][0] = 2 if t < DRY else 0
        if t == EMPTY:
            counts[t] = [0] * size
    data = data_of(tuple(map(tuple, counts)))
    for announced in (True, False):
        run = case.run(data, announced=announced)
        problem = differs_between_ranks(case.comm, ["after finish, the model"], [run.final])
        problem = problem or miscounted(run, data)
        if case.comm.allgather_object(problem).count(None) < size:
            return problem
    return _separate_data(case) if case.algorithm.distributed_after == 0 else None


def _separate_data(case: Case) -> str | None:
    """Check the same with separate data on every rank, if a warm start does not exclude it."""
    size, epochs = case.comm.size, 2
    lengths = [SEPARATE[k % len(SEPARATE)] for k in range(size)]
    centres = np.random.default_rng([12, case.comm.rank]).standard_normal(
        (lengths[case.comm.rank], VALUES)
    )
    labels = np.zeros(len(centres), np.int64)
    source = RankSource(centres, labels, 2 * size + 1, epochs=epochs, dtype=None)
    learner = case.learner()
    for x, _ in source.minibatches(learner):
        put_gradient(learner, np.stack([np.ones_like(x), x], axis=1))
        learner.step(samples=len(x))
    learner.finish()
    expected = epochs * sum(lengths)
    if learner.samples != expected:
        return f"with {lengths} samples on the ranks, {learner.samples} of {expected} were counted"
    what = "after finish, the model of data of every rank's own"
    return differs_between_ranks(case.comm, [what], [learner.parameters.flat])


@check()
def nothing(case: Case) -> str | None:
    """A minibatch without samples on any rank changes nothing."""
    run, data, learner = case.run(), case.data(), case.learner()
    between, totals = Run(), []
    no_samples: list[Array] = [part[:0] for part in data[0]]
    for t, parts in enumerate(data):
        totals.append(step(learner, no_samples, announced=t % 2 == 0))
        between.record(learner, step(learner, parts))
    totals.append(step(learner, no_samples, announced=False))
    between.finish(learner)
    if any(totals):
        return f"step returned {totals} for minibatches without samples"
    return first_difference(between, run)


@check()
def repeatable(case: Case) -> str | None:
    """The same run gives the same bits again."""
    run = case.run()
    second = trained(case.learner(replace(case.algorithm)), case.data())
    return first_difference(second, run)


@check()
def announced(case: Case) -> str | None:
    """Announced sample counts of a source give the same bits as counts gathered by the ranks."""
    return first_difference(case.run(announced=False), case.run(announced=True))


@check()
def rates(case: Case) -> str | None:
    """A session's factor on the learning rate gives the bits of a schedule with these values."""
    algorithm = case.algorithm
    if algorithm.asynchronous or algorithm.optimizer_on_servers:
        return None  # sessions give these no factor
    given, data = case.optimizer, case.data()
    name = "lr_per_sample" if given.lr is None else "lr"
    rate, later = given.rate_after(0), sum(len(part) for parts in data[:FASTER] for part in parts)
    constant = replace(given, **{name: rate})
    rises = Steps({0: rate, later: FACTOR * rate})
    scheduled = trained(case.learner(optimizer=replace(given, **{name: rises})), data)
    learner, run = case.learner(optimizer=constant), Run()
    for t, parts in enumerate(data):
        learner.local_step.state.lr_factor = FACTOR if t >= FASTER else 1.0
        run.record(learner, step(learner, parts))
    return first_difference(run.finish(learner), scheduled)


@check()
def observed(case: Case) -> str | None:
    """Meeting, waiting, and looking at the shared model change nothing."""
    learner, run = case.learner(), Run()
    for parts in case.data():
        learner.meet()
        with learner.shared_model():
            pass
        wait_for(learner.states)
        weight_of(learner.state)
        run.record(learner, step(learner, parts))
    return first_difference(run.finish(learner), case.run())


@check(least_ranks=2, largest=True)
def orders(case: Case) -> str | None:
    """In whatever order the ranks run, none waits without an end, and the same bits come out.
    (Asynchronous ranks end with one model.)"""
    finals: list[Array] = []

    def program(comm: Communicator) -> Array:
        one = replace(case, comm=comm)
        return trained(one.learner(), one.data(EXPLORED)).final

    def same(outcome: Outcome) -> None:
        if not finals or case.algorithm.asynchronous:
            finals[:] = outcome.results[:1]
        for rank, final in enumerate(outcome.results):
            problem = difference(f"rank {rank}'s final model", final, finals[0])
            assert problem is None, problem

    # The explored ranks are threads of rank 0's process, for which the other ranks wait.
    for first in range(0, case.schedules, AT_A_TIME):
        schedules, problem = min(AT_A_TIME, case.schedules - first), None
        try:
            if case.comm.rank == 0:
                explore(program, case.comm.size, schedules, faults=0, seed=first, check=same)
        except ScheduleFailed as error:
            problem = str(error)
        if any(case.comm.allgather_object(problem)):
            return problem
    return None


@check()
def resume(case: Case) -> str | None:
    """A run stopped before any step and resumed has the bits of an uninterrupted run."""
    data = case.data(STOPS)
    uninterrupted = trained(case.learner(), data)
    stopped, saved_states = case.learner(), []
    for parts in data:
        saved_states.append(_saved(stopped))
        step(stopped, parts)
    saved_states.append(_saved(stopped))
    problems = []
    for first, saved in enumerate(saved_states):
        learner = case.learner()
        learner.parameters.flat[...] = np.nan
        restore(learner, unflatten(json.loads(saved[0]), saved[1]))
        problem = first_difference(trained(learner, data, first=first), uninterrupted, first)
        problems.append(problem and f"stopped before step {first}: {problem}")
    return first_of(problems)


def _saved(learner: Learner) -> tuple[str, dict[str, Array]]:
    """Return the content of a checkpoint at this moment: JSON text and arrays. Local."""
    tree, arrays = flatten(capture(learner))
    return json.dumps(tree), copy.deepcopy(arrays)
