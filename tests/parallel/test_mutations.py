"""The invariants fail where the package is wrong: each fault is put in, and must be noticed.

The faults are in `mutations` and `local_mutations`. They run on threads, where a patch reaches all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from cases import CODECS, OPTIMIZERS
from hosts import (
    hosts_send_one_message,
    hosts_sum_first,
    sends_non_owned_residuals,
    sends_what_is_ready,
)
from invariants import (
    conserves_gradients,
    equals_serial,
    equals_two_stages_in_one_place,
    keeps_residuals_when_bits_change,
    sums_in_rank_order,
)
from learners import refuses_what_is_not_finite, starts_warm
from local_mutations import LOCAL_MUTATIONS
from local_updates import (
    ALGORITHMS,
    averaging_every_step_is_data_parallel,
    block_momentum_every_step_is_momentum,
    diloco_is_nesterov_block_momentum,
    equals_the_equations,
    slow_momentum_is_classical_at_a_constant_rate,
)
from mutations import MUTATIONS, Mutation, broken
from pipeline_mutations import PIPELINE_MUTATIONS

from parallel_sgd import Communicator, UserError, simulate
from parallel_sgd.communication import messages
from parallel_sgd.communication.threads import ThreadCommunicator
from parallel_sgd.exchange import scheduler

RANKS = 3  # with two, a sum does not depend on the order
Check = Callable[[Communicator], None]

CHECKS: dict[str, Check] = {
    "order": lambda comm: sums_in_rank_order(comm, "long", np.float64),
    **{
        f"conservation, {name}": partial(conserves_gradients, codec=codec, layout="matrix and bias")
        for name, codec in CODECS.items()
    },
    **{
        f"two stages, {name}": partial(
            equals_two_stages_in_one_place, codec=codec, layout="large and small"
        )
        for name, codec in CODECS.items()
    },
    "serial": lambda comm: equals_serial(comm, OPTIMIZERS["SGD"]),
    "changing bits": lambda comm: keeps_residuals_when_bits_change(comm, {0: 1, 60: 32}),
    "warm start": lambda comm: starts_warm(comm, OPTIMIZERS["momentum"]),
    "bad gradient": lambda comm: refuses_what_is_not_finite(comm, 1, np.nan),
    **{f"equations, {name}": partial(equals_the_equations, name=name) for name in ALGORITHMS},
    "averaging and data-parallel": averaging_every_step_is_data_parallel,
    "block momentum and momentum": block_momentum_every_step_is_momentum,
    "SlowMo and classical": slow_momentum_is_classical_at_a_constant_rate,
    "DiLoCo and Nesterov": diloco_is_nesterov_block_momentum,
    "large gradient": lambda comm: refuses_what_is_not_finite(comm, 1, 1e35),
}

SENT = {"transport": "pipelined"}

#: The same, by pieces; and what only a pipeline does.
PIPELINED: dict[str, Check] = {
    "order, pipelined": lambda comm: sums_in_rank_order(comm, "long", np.float64, **SENT),
    **{
        f"conservation, {name}, pipelined": partial(
            conserves_gradients, codec=codec, layout="matrix and bias", **SENT
        )
        for name, codec in CODECS.items()
    },
    **{
        f"two stages, {name}, pipelined": partial(
            equals_two_stages_in_one_place, codec=codec, layout="large and small", **SENT
        )
        for name, codec in CODECS.items()
    },
    "serial, pipelined": lambda comm: equals_serial(comm, OPTIMIZERS["SGD"], **SENT),
    "changing bits, pipelined": lambda comm: keeps_residuals_when_bits_change(
        comm, {0: 1, 60: 32}, **SENT
    ),
    "readiness, pipelined": lambda comm: sends_what_is_ready(comm, "pipelined"),
    "hosts": lambda comm: hosts_sum_first(comm, "aab", "long"),
    "hosts, 1 bit": lambda comm: hosts_send_one_message(comm, "aab", CODECS["1 bit"]),
    "non-owned residuals": lambda comm: sends_non_owned_residuals(comm, "aab"),
}
CHECKS |= PIPELINED

ALL = [*MUTATIONS, *LOCAL_MUTATIONS, *PIPELINE_MUTATIONS]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(messages, "PIECE_VALUES", 128)
    monkeypatch.setattr(scheduler, "WINDOW", 600)


def noticed_by(mutation: Mutation) -> list[str]:
    """The checks that must; a fault of the exchange is noticed with either transport."""
    each = mutation.killed_by
    if mutation.target is ThreadCommunicator and mutation.name in ("alltoall", "allgather"):
        return each  # which a pipeline does not call
    return [*each, *(f"{check}, pipelined" for check in each if f"{check}, pipelined" in PIPELINED)]


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_fault_all_checks_pass(check):
    simulate(RANKS, CHECKS[check], timeout_s=20)


@pytest.mark.parametrize(
    ("mutation", "check"),
    [(mutation, check) for mutation in ALL for check in noticed_by(mutation)],
    ids=str,
)
def test_a_fault_is_noticed(mutation, check, monkeypatch):
    with broken(mutation, monkeypatch):
        simulate(RANKS, CHECKS[check], timeout_s=20)


def test_a_message_that_is_lost_is_not_waited_for_without_end(monkeypatch):
    """Sent to nobody, as to a wrong owner: no check comes to its end, and the time limit does."""
    right = scheduler.Scheduler.send

    def send(self, task, message, peer, kind):
        if (self._messages.rank, task.piece.tag, kind) != (1, 0, scheduler.ENCODED):
            right(self, task, message, peer, kind)

    monkeypatch.setattr(scheduler.Scheduler, "send", send)
    with pytest.raises(UserError, match=r"timeout_s=0\.5"):
        simulate(RANKS, CHECKS["order, pipelined"], timeout_s=0.5)
