"""The identities of parameter servers fail where the package is wrong: see `test_mutations`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
from mutations import Mutation, broken, nothing
from served_identities import (
    a_pipeline_is_one_step_late,
    every_push_counts,
    follows_the_equations,
    not_ahead_of_the_slowest_is_data_parallel,
    one_worker_is_serial,
    synchronous_deltas_are_model_averaging,
    synchronous_is_data_parallel,
    taking_turns_is_serial,
    the_bound_holds,
    what_few_bits_lose_is_not_lost,
)

from parallel_sgd import SGD, Adam, DataParallelASGD, simulate
from parallel_sgd.optimizers import Optimizer
from parallel_sgd.parameter_server import Client, ServedModel
from parallel_sgd.parameter_server.parts import Part
from parallel_sgd.schedules import Linear

RANKS = 3  # two workers and a server

follow = partial(follows_the_equations, apart=True)
CHECKS: dict[str, Callable[..., None]] = {
    "serial": partial(one_worker_is_serial, optimizer=Adam(lr=0.05)),
    "serial, period": partial(one_worker_is_serial, optimizer=Adam(lr=0.05), period=3),
    "serial, deltas": partial(one_worker_is_serial, optimizer=SGD(lr=0.1), currency="deltas"),
    "turns": partial(taking_turns_is_serial, apart=True, optimizer=SGD(lr=0.2)),
    "every push": partial(every_push_counts, apart=True),
    "rounds": partial(synchronous_is_data_parallel, apart=True, optimizer=SGD(lr=0.2), told=True),
    "rounds, deltas": partial(
        synchronous_deltas_are_model_averaging, apart=True, optimizer=SGD(lr=0.1), sync_steps=3
    ),
    "never ahead": partial(not_ahead_of_the_slowest_is_data_parallel, apart=True),
    "bound": partial(the_bound_holds, apart=True, staleness=2),
    "pipeline": a_pipeline_is_one_step_late,
    "pipeline, compensation": partial(a_pipeline_is_one_step_late, delay_compensation=0.3),
    "delay": follow,
    "geo": partial(follow, mode="geo", sync_steps=2, rounds=8),
    "compensation": partial(follow, delay_compensation=0.7, lr=0.05),
    "ramp": partial(follow, ramp_minibatches=2, ramp_coefficient=0.4),
    "ramp, linear": partial(follow, ramp_minibatches=4, ramp_coefficient=0.2, ramp="linear"),
    "ramp, deltas": partial(follow, ramp_minibatches=2, ramp_coefficient=0.4, currency="deltas"),
    "schedule": partial(follow, lr=Linear({0: 0.3, 20: 0.05})),
    "1 bit": partial(what_few_bits_lose_is_not_lost, apart=True, bits=1, sync_steps=3),
}


def drops_a_push(right, self, worker, push):
    if self.version != 3:
        right(self, worker, push)
        return
    self.version += 1
    self.pushes[worker] += 1


def applies_twice(right, self, worker, push):
    if self.version == 3:
        self._step(push.vector, push.samples, push.factor)
    right(self, worker, push)


def does_not_count(right, self, *arguments):
    before = self.version
    staleness = right(self, *arguments)
    self.version = before
    return staleness


def one_clock_too_far(right, self, worker, *meeting):
    return self.clocks[worker] - min(self.clocks) <= self.rules.staleness + 1


def loses_what_is_lost(right, self, vector, residual, *more):
    before = None if residual is None else residual.copy()
    body = right(self, vector, residual, *more)
    if residual is not None:
        residual[...] = before
    return body


def forgets_backups(right, self, worker):
    kept = copy.deepcopy(self._backups)
    x = right(self, worker)
    self._backups = kept
    return x


def gives_the_model_before(right, self, worker):
    now = right(self, worker).copy()
    before = getattr(self, "before", now)
    self.before = now
    return before


def keeps_the_rest(right, self, state, *arguments):
    state.gathered_samples = 0
    right(self, state, *arguments)


def never_clears(right, self, state, work, gathered, *rest):
    before = gathered.copy()
    right(self, state, work, gathered, *rest)
    if state.gathered is not None:
        state.gathered[...] = before


def sums(right, self, push, samples):
    return samples / push.samples


def unweighted(right, self, push, samples):
    return 1 / 2 if self.rules.currency == "deltas" else 1.0


def subtracts_all(right, self, delta, weight, samples):
    return right(self, delta, 1.0, samples)


def at_full_rate(right, self, state, samples):
    return right(self, state, samples) / (state.lr_factor or 1)


def by_no_clock(right, self, samples):
    return right(self, 0)


def takes_at_once(right, self, state, work, *rest):
    right(self, state, work, *rest)
    state.wait()
    work.parameters.flat[...] = state.arrived


MUTATIONS = [
    Mutation("a push dropped", ServedModel, "_apply", drops_a_push, ["serial", "every push"]),
    Mutation("a push doubled", ServedModel, "_apply", applies_twice, ["turns", "every push"]),
    Mutation("not counted", ServedModel, "push", does_not_count, ["turns", "every push", "delay"]),
    Mutation("sum in place of mean", ServedModel, "_weight", sums, ["rounds"]),
    Mutation("weights all the same", ServedModel, "_weight", unweighted, ["rounds, deltas"]),
    Mutation(
        "gate too far", ServedModel, "may_answer", one_clock_too_far, ["bound", "never ahead"]
    ),
    Mutation("residual not updated", Part, "encoded", loses_what_is_lost, ["1 bit"]),
    Mutation("stale pull", Client, "pull", nothing, ["turns"]),
    Mutation(
        "stale answer",
        ServedModel,
        "give",
        gives_the_model_before,
        ["serial", "serial, deltas", "delay", "pipeline"],
    ),
    Mutation(
        "backup of the start",
        ServedModel,
        "give",
        forgets_backups,
        ["compensation", "pipeline, compensation"],
    ),
    Mutation("rest kept", DataParallelASGD, "finish", keeps_the_rest, ["serial, period", "1 bit"]),
    Mutation(
        "gradients not cleared",
        DataParallelASGD,
        "_exchange",
        never_clears,
        ["serial, period", "1 bit"],
    ),
    Mutation("deltas not averaged", ServedModel, "_subtract", subtracts_all, ["geo"]),
    Mutation(
        "no ramp", Optimizer, "mean_lr", at_full_rate, ["ramp", "ramp, linear", "ramp, deltas"]
    ),
    Mutation("no schedule", Optimizer, "rate_after", by_no_clock, ["schedule"]),
    Mutation("pipeline without delay", DataParallelASGD, "_exchange", takes_at_once, ["pipeline"]),
]


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_fault_all_checks_pass(check):
    simulate(RANKS, CHECKS[check], timeout_s=20)


@pytest.mark.parametrize(
    ("mutation", "check"),
    [(mutation, check) for mutation in MUTATIONS for check in mutation.killed_by],
    ids=str,
)
def test_a_fault_is_noticed(mutation, check, monkeypatch):
    with broken(mutation, monkeypatch):
        simulate(RANKS, CHECKS[check], timeout_s=5)
