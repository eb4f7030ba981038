"""The invariants fail where the package is wrong: each fault is put in, and must be noticed.

The faults are in `mutations` and `local_mutations`. They run on threads, where a patch reaches all
ranks.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cases import BLOCK_SIZE, CODECS, OPTIMIZERS
from invariants import (
    averages_over_samples,
    conserves_gradients,
    equals_serial,
    equals_two_stages_in_one_place,
    identical_data_change_nothing,
    keeps_residuals_when_bits_change,
    sums_in_rank_order,
)
from learners import goes_on_as_if_never_stopped, refuses_what_is_not_finite, starts_warm
from local_mutations import LOCAL_MUTATIONS
from local_updates import (
    ALGORITHMS,
    averaging_every_step_is_data_parallel,
    block_momentum_every_step_is_momentum,
    diloco_is_nesterov_block_momentum,
    equals_the_equations,
    identical_data_are_one_rank,
    slow_momentum_is_classical_at_a_constant_rate,
)
from mutations import MUTATIONS

import parallel_sgd
from parallel_sgd import Communicator, DataParallelSGD, simulate

RANKS = 3  # with two, a sum does not depend on the order
Check = Callable[[Communicator], None]

CHANGING_BITS = DataParallelSGD(gradient_bits={0: 1, 20: 4}, block_size=BLOCK_SIZE)

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
    "serial, Adam": lambda comm: equals_serial(comm, OPTIMIZERS["Adam"]),
    "mean": averages_over_samples,
    "identical data": lambda comm: identical_data_change_nothing(comm, 32),
    "changing bits": lambda comm: keeps_residuals_when_bits_change(comm, {0: 1, 60: 32}),
    "resuming": lambda comm: goes_on_as_if_never_stopped(comm, CHANGING_BITS, OPTIMIZERS["Adam"]),
    "warm start": lambda comm: starts_warm(comm, OPTIMIZERS["momentum"]),
    "bad gradient": lambda comm: refuses_what_is_not_finite(comm, 1, np.nan),
    **{f"equations, {name}": partial(equals_the_equations, name=name) for name in ALGORITHMS},
    "averaging and data-parallel": averaging_every_step_is_data_parallel,
    "block momentum and momentum": block_momentum_every_step_is_momentum,
    "SlowMo and classical": slow_momentum_is_classical_at_a_constant_rate,
    "DiLoCo and Nesterov": diloco_is_nesterov_block_momentum,
    "identical data, blocks": identical_data_are_one_rank,
    "large gradient": lambda comm: refuses_what_is_not_finite(comm, 1, 1e35),
}


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_fault_all_checks_pass(check):
    simulate(RANKS, CHECKS[check], timeout_s=20)


@pytest.mark.parametrize(
    ("mutation", "check"),
    [
        pytest.param(mutation, check, id=f"{mutation.fault}, {mutation.name}: {check}")
        for mutation in (*MUTATIONS, *LOCAL_MUTATIONS)
        for check in mutation.killed_by
    ],
)
def test_a_fault_is_noticed(mutation, check, monkeypatch):
    right = getattr(mutation.target, mutation.name)
    monkeypatch.setattr(mutation.target, mutation.name, mutation.wrong(right))
    with (
        pytest.raises((AssertionError, pytest.fail.Exception)) as caught,
        np.errstate(all="ignore"),
    ):
        simulate(RANKS, CHECKS[check], timeout_s=20)
    assert raised_by_a_check(caught.value), "noticed by the package or the patch, not by the check"


def raised_by_a_check(error: BaseException) -> bool:
    """Whether it was an assertion of `invariants`, `learners` or `local_updates`."""
    here, package = Path(__file__).parent, Path(parallel_sgd.__file__).parent
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [file for file in files if here in file.parents or package in file.parents]
    return ours[-1] in [here / f"{name}.py" for name in ("invariants", "learners", "local_updates")]
