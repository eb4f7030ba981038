"""The invariants fail where the package is wrong: each fault is put in, and must be noticed.

The faults are in `mutations`, and in `local_mutations`, `low_rank_mutations`,
`skipped_mutations` and `pipeline_mutations`.
They run on threads, where a patch reaches all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from cases import BLOCK_SIZE, CODECS, OPTIMIZERS
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
    fragments_every_step_are_data_parallel,
    slow_momentum_is_classical_at_a_constant_rate,
)
from low_rank import (
    conserves,
    equals_the_paper,
    finds_all,
    is_exact_at_low_rank,
    keeps_errors_small,
    replaces_anew,
)
from low_rank_mutations import LOW_RANK_MUTATIONS
from mutations import MUTATIONS, Mutation, broken
from pipeline_mutations import PIPELINE_MUTATIONS
from skipped import (
    ends_where_it_goes_on,
    goes_back_to_the_common_model,
    leaves_no_trace,
    names_who_differs,
    refuses_a_push,
    what_is_left_out_is_not_owed,
)
from skipped_mutations import LEFT_OUT_MUTATIONS

from parallel_sgd import Communicator, UserError, simulate
from parallel_sgd.communication import ThreadCommunicator
from parallel_sgd.compression import EntropyCoded
from parallel_sgd.exchange import scheduler

ENTROPY_CODE = EntropyCoded(bits=1, block_size=BLOCK_SIZE)
RANKS = 3  # with two, a sum does not depend on the order
Check = Callable[[Communicator], None]


def of_exchanges(**sent: str) -> dict[str, Check]:
    """What every transport must hold."""
    gradients = {
        f"conservation, {name}": partial(
            conserves_gradients, codec=codec, layout="matrix and bias", **sent
        )
        for name, codec in {**CODECS, "entropy code": ENTROPY_CODE}.items()
    }
    stages = {
        f"two stages, {name}": partial(
            equals_two_stages_in_one_place, codec=codec, layout="large and small", **sent
        )
        for name, codec in CODECS.items()
    }
    return {
        **gradients,
        **stages,
        "order": partial(sums_in_rank_order, layout="long", dtype=np.float64, **sent),
        "serial": partial(equals_serial, optimizer=OPTIMIZERS["SGD"], **sent),
        "changing bits": partial(keeps_residuals_when_bits_change, schedule={0: 1, 60: 32}, **sent),
    }


CHECKS: dict[str, Check] = {
    **of_exchanges(),
    "warm start": partial(starts_warm, optimizer=OPTIMIZERS["momentum"]),
    "bad gradient": partial(refuses_what_is_not_finite, bits=4, value=np.nan),
    "large gradient": partial(refuses_what_is_not_finite, bits=4, value=1e35),
    **{f"equations, {name}": partial(equals_the_equations, name=name) for name in ALGORITHMS},
    "averaging and data-parallel": averaging_every_step_is_data_parallel,
    "block momentum and momentum": block_momentum_every_step_is_momentum,
    "SlowMo and classical": slow_momentum_is_classical_at_a_constant_rate,
    "DiLoCo and Nesterov": diloco_is_nesterov_block_momentum,
    "fragments and data-parallel": fragments_every_step_are_data_parallel,
    "PowerSGD, the paper": equals_the_paper,
    "PowerSGD, conservation": partial(conserves, rank=2, scale=1.0),
    "PowerSGD, exact": partial(is_exact_at_low_rank, rank=2, scale=1.0),
    "PowerSGD, tiny": partial(is_exact_at_low_rank, rank=2, scale=1e-160),
    "PowerSGD, all found": finds_all,
    "PowerSGD, replaced columns": replaces_anew,
    "PowerSGD, small errors": keeps_errors_small,
    **{
        f"left out, {name}": partial(leaves_no_trace, name=name, culprit="gradient")
        for name in ("1 bit", "overlap", "double buffering", "blocks", "blocks, keep")
    },
    "left out, loss": partial(leaves_no_trace, name="1 bit", culprit="loss"),
    "left out, common model": partial(goes_back_to_the_common_model, culprit="gradient"),
    "left out, conservation": partial(what_is_left_out_is_not_owed, overlap=True),
    "left out, in a row": partial(ends_where_it_goes_on, name="overlap"),
    "left out, push": partial(refuses_a_push, currency="deltas", mode="sync"),
    "odd one out": partial(names_who_differs, what="momentum", every=1),
}

#: The same, by pieces; and what only a pipeline does.
PIPELINED: dict[str, Check] = {
    **{f"{name}, pipelined": check for name, check in of_exchanges(transport="pipelined").items()},
    "readiness, pipelined": lambda comm: sends_what_is_ready(comm, "pipelined", CODECS["1 bit"]),
    "hosts": lambda comm: hosts_sum_first(comm, "aab", "long"),
    "hosts, 1 bit": lambda comm: hosts_send_one_message(comm, "aab", CODECS["1 bit"]),
    "non-owned residuals": lambda comm: sends_non_owned_residuals(comm, "aab"),
}
CHECKS |= PIPELINED

pytestmark = pytest.mark.usefixtures("small_pieces")

ALL = [
    *MUTATIONS,
    *LOCAL_MUTATIONS,
    *LOW_RANK_MUTATIONS,
    *LEFT_OUT_MUTATIONS,
    *PIPELINE_MUTATIONS,
]


def noticed_by(mutation: Mutation) -> list[str]:
    """The checks that must; a fault of the exchange is noticed with either transport."""
    checks = mutation.killed_by
    if mutation.target is ThreadCommunicator and mutation.name in ("alltoall", "allgather"):
        return checks  # which a pipeline does not call
    pipelined = [f"{check}, pipelined" for check in checks]
    return [*checks, *(check for check in pipelined if check in PIPELINED)]


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
