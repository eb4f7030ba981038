"""Asynchronous SGD with parameter servers: identity 9 of ALGORITHMS.md."""

from __future__ import annotations

import re

import numpy as np
import pytest
from cases import few_ranks_but
from served_identities import (
    a_pipeline_is_one_step_late,
    every_push_counts,
    follows_the_equations,
    leads_by,
    not_ahead_of_the_slowest_is_data_parallel,
    one_worker_is_serial,
    synchronous_deltas_are_model_averaging,
    synchronous_is_data_parallel,
    taking_turns_is_serial,
    the_bound_holds,
    what_few_bits_lose_is_not_lost,
)
from served_training import (
    asynchronous,
    beside_and_apart,
    finished,
    learner_of,
    servers_of,
    starting_point,
)

from parallel_sgd import SGD, Adagrad, Adam, Learner, MomentumSGD
from parallel_sgd.parameter_server.roles import GIL
from parallel_sgd.schedules import Linear, Steps

pytestmark = pytest.mark.messages

OPTIMIZERS = {
    "SGD": SGD(lr=0.2),
    "SGD, scheduled": SGD(lr=Steps({0: 0.3, 8: 0.05})),
    "momentum": MomentumSGD(lr=0.1),
    "Adagrad": Adagrad(lr=0.3),
    "Adam": Adam(lr=0.05),
}

every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def all_on_the_last(label, number, servers):
    """The others hold nothing."""
    return servers - 1


@every_optimizer
def test_one_worker_is_serial(on_ranks, optimizer):
    on_ranks(lambda comm: one_worker_is_serial(comm, optimizer))


@pytest.mark.parametrize(
    "options",
    [
        {"period": 3},
        {"placement": "hash"},
        {"slice_parameters": False},
        {"placement": all_on_the_last},
        {"mode": "bounded", "staleness": 0},
        {"mode": "sync"},
        {"merge": "mean"},
        {"delay_compensation": 0.5},
        {"mode": "sync", "period": 2, "merge": "sum"},
    ],
    ids=lambda options: ", ".join(options),
)
def test_one_worker_is_serial_with_other_options(on_ranks, options):
    on_ranks(lambda comm: one_worker_is_serial(comm, Adam(lr=0.05), **options))


@pytest.mark.parametrize("optimizer", ["momentum", "Adam"])
@pytest.mark.parametrize("options", [{}, {"mode": "geo", "period": 3}], ids=["async", "geo"])
def test_one_worker_with_deltas_is_serial(on_ranks, optimizer, options):
    rule = OPTIMIZERS[optimizer]
    on_ranks(lambda comm: one_worker_is_serial(comm, rule, currency="deltas", **options))


@beside_and_apart
@pytest.mark.parametrize("optimizer", [SGD(lr=0.2), Adam(lr=0.05)], ids=["SGD", "Adam"])
def test_workers_that_take_turns_are_serial(on_ranks, apart, optimizer):
    on_ranks(lambda comm: taking_turns_is_serial(comm, apart, optimizer))


EQUATIONS = {
    "constant delay": {},
    "mean": {"merge": "mean"},
    "period": {"sync_steps": 2, "rounds": 8},
    "delay compensation": {"delay_compensation": 0.7, "lr": 0.05},
    "delay compensation, mean": {"delay_compensation": 0.4, "sync_steps": 2, "merge": "mean"},
    "deltas": {"currency": "deltas"},
    "geo": {"mode": "geo", "sync_steps": 2, "rounds": 8},
    "geo, sum": {"mode": "geo", "sync_steps": 3, "merge": "sum"},
    "ramp, staircase": {"ramp_minibatches": 2, "ramp_coefficient": 0.4},
    "ramp, linear": {"ramp_minibatches": 4, "ramp_coefficient": 0.2, "ramp": "linear"},
    "ramp, deltas": {"ramp_minibatches": 2, "ramp_coefficient": 0.3, "currency": "deltas"},
    "schedule": {"lr": Linear({0: 0.3, 20: 0.05})},
    "schedule, deltas": {"lr": Linear({0: 0.3, 30: 0.05}), "currency": "deltas", "sync_steps": 2},
}


@beside_and_apart
@pytest.mark.parametrize("name", few_ranks_but(["constant delay", "geo"], EQUATIONS))
def test_the_equations(on_ranks, apart, name):
    on_ranks(lambda comm: follows_the_equations(comm, apart, **EQUATIONS[name]))


@beside_and_apart
def test_a_round_has_the_largest_ramp_of_its_pushes(comm, apart):
    """It counts a worker's minibatches with samples: those of worker 0 are in steps 0, 2 and 4."""
    servers, ramp = servers_of(comm, apart), {"ramp_minibatches": 1, "ramp_coefficient": 0.25}
    algorithm = asynchronous(mode="sync", servers=servers, sync_steps=3, **ramp)
    learner = learner_of(comm, algorithm, SGD(lr=1.0))
    for step in range(0 if learner.serves else 5):
        m = int(step % 2 == (learner.comm.rank > 0))
        learner.gradient.flat[:] = m
        learner.step(samples=m)
    # Pushed are steps 0 to 2, and then 3 and 4. A worker alone has no steps 1 and 3.
    factors = 0.5 + 0.75 if comm.size - servers > 1 else 0.75
    assert np.array_equal(finished(comm, learner), starting_point().flat - factors)


@beside_and_apart
@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_every_push_counts(on_ranks, apart, mode):
    options = {"staleness": 2} if mode == "bounded" else {}
    on_ranks(lambda comm: every_push_counts(comm, apart, mode=mode, **options))


@beside_and_apart
@pytest.mark.parametrize(
    ("optimizer", "told"), [("SGD", True), ("momentum", True), ("Adam", False)]
)
def test_synchronous_is_data_parallel(on_ranks, apart, optimizer, told):
    rule = OPTIMIZERS[optimizer]
    on_ranks(lambda comm: synchronous_is_data_parallel(comm, apart, rule, told))


@beside_and_apart
@pytest.mark.parametrize("period", [{"sync_steps": 3}, {"sync_period": 5}], ids=str)
def test_synchronous_deltas_are_model_averaging(on_ranks, apart, period):
    rule = MomentumSGD(lr=0.1)
    on_ranks(lambda comm: synchronous_deltas_are_model_averaging(comm, apart, rule, **period))


@beside_and_apart
def test_not_ahead_of_the_slowest_is_data_parallel(on_ranks, apart):
    on_ranks(lambda comm: not_ahead_of_the_slowest_is_data_parallel(comm, apart))


@beside_and_apart
@pytest.mark.parametrize("staleness", [0, 2])
def test_the_bound_of_the_lead(on_ranks, apart, staleness):
    on_ranks(lambda comm: the_bound_holds(comm, apart, staleness))


@beside_and_apart
def test_without_a_bound_there_is_none(comm, apart):
    several = comm.size - servers_of(comm, apart) > 1
    assert (leads_by(comm, apart, ahead=5) >= 5) == several


@pytest.mark.parametrize(
    "options",
    [{}, {"placement": "hash"}, {"mode": "bounded"}, {"delay_compensation": 0.3}],
    ids=str,
)
def test_a_pipeline_is_one_step_late(on_ranks, options):
    on_ranks(lambda comm: a_pipeline_is_one_step_late(comm, **options))


@beside_and_apart
@pytest.mark.parametrize("bits", [0.25, 1, 2, 8, 16, 32])
def test_what_few_bits_lose_is_not_lost(on_ranks, apart, bits):
    options = {"sync_steps": 2, "pipeline": True} if bits in (2, 16) else {"sync_steps": 3}
    on_ranks(lambda comm: what_few_bits_lose_is_not_lost(comm, apart, bits, **options))


@beside_and_apart
@pytest.mark.parametrize("bits", [0.25, 8])
def test_what_a_decay_forgets_is_known(on_ranks, apart, bits):
    """The servers share a vector, whose residual decays once before each push."""
    options = {"sync_steps": 3, "residual_decay": 0.9}
    on_ranks(lambda comm: what_few_bits_lose_is_not_lost(comm, apart, bits, **options))


def test_servers_beside_workers_are_warned_of(comm):
    algorithm = asynchronous(servers=0)
    if comm.rank or comm.size == 1:
        Learner(starting_point(), SGD(lr=0.1), algorithm, comm)
        return
    with pytest.warns(UserWarning, match=f"^{re.escape(GIL)}$") as caught:
        Learner(starting_point(), SGD(lr=0.1), algorithm, comm)
    assert len(caught) == 1
