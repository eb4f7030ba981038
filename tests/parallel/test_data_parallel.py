"""DataParallelSGD: the identities of docs/algorithms.md, and what few bits and many ranks keep."""

from __future__ import annotations

import numpy as np
import pytest
from cases import OPTIMIZERS, zeros
from invariants import (
    equals_serial,
    keeps_residuals_when_bits_change,
)

from parallel_sgd import DataParallelSGD, Learner, MomentumSGD, UserError

every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


@pytest.mark.parametrize("optimizer", [OPTIMIZERS["Adam"], OPTIMIZERS["Nesterov"]], ids=repr)
def test_ranks_are_serial_on_the_concatenated_minibatch(on_ranks, optimizer):
    on_ranks(lambda comm: equals_serial(comm, optimizer))


@pytest.mark.parametrize(
    "schedule",
    [
        {0: 0.25, 20: 32},
        {0: 1, 10: 2, 15: 4, 20: 8, 25: 16, 30: 32},
        {0: 32, 10: 0.5, 25: 1, 40: 32},
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [64, 100, 1024])
@pytest.mark.parametrize("code", ["entropy", "sign"])
def test_residuals_survive_a_change_of_bits(on_ranks, schedule, block_size, code):
    """Blocks of every size: the residuals of one number of bits must fit all others."""
    options = {"code": code} if 1 in schedule.values() else {}
    on_ranks(lambda comm: keeps_residuals_when_bits_change(comm, schedule, block_size, **options))


@pytest.mark.parametrize("bits", [0.25, 1, 16, {0: 32, 100: 1}])
def test_few_bits_are_for_float32(comm, bits):
    parameters = zeros("large and small", np.float64)
    with pytest.raises(UserError, match=r"needs float32 parameters, but these are float64"):
        Learner(parameters, MomentumSGD(lr=0.1), DataParallelSGD(gradient_bits=bits), comm)
