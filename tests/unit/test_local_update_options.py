"""The options of local updates: what they mean, and what is refused."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from parallel_sgd import (
    BlockMomentumSGD,
    CNTKBlockMomentumSGD,
    DiLoCo,
    ModelAveragingSGD,
    SlowMo,
    UserError,
)
from parallel_sgd.algorithms.outer import Block


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ModelAveragingSGD, {"block_samples": 0}, "block_samples=0 must be a whole number, at"),
        (ModelAveragingSGD, {"sync_period": 1.5}, "sync_period=1.5 must be a whole number"),
        (ModelAveragingSGD, {"sync_steps": -1}, "sync_steps=-1 must be a whole number, at least 1"),
        (
            BlockMomentumSGD,
            {"block_samples": 10, "sync_period": 5},
            "sync_period=5 and block_samples=10: at most one of sync_period, sync_steps, block_s",
        ),
        (ModelAveragingSGD, {"overlap_samples": -1}, "overlap_samples=-1 must be a whole number"),
        (
            ModelAveragingSGD,
            {"merge_weight": 1.5},
            "merge_weight=1.5 must be .* at least 0 and at most 1",
        ),
        (ModelAveragingSGD, {"merge_weight": 0.5}, "merge_weight=0.5 has no effect without overl"),
        (ModelAveragingSGD, {"merge_weight": math.nan}, "merge_weight=nan must be"),
        (ModelAveragingSGD, {"inner_state": "reset"}, "inner_state='reset' must be one of"),
        (ModelAveragingSGD, {"gradient_bits": 3}, "gradient_bits=3 must be one of 1, 2, 4, 8, 16"),
        (BlockMomentumSGD, {"block_momentum": 1}, "block_momentum=1 must be .* less than 1"),
        (BlockMomentumSGD, {"block_momentum": -0.1}, "block_momentum=-0.1 must be .* at least 0"),
        (BlockMomentumSGD, {"block_momentum": math.nan}, "block_momentum=nan must be"),
        (
            BlockMomentumSGD,
            {"block_momentum": 0.9, "block_momentum_as_time_constant": 1000},
            "block_momentum=0.9 and block_momentum_as_time_constant=1000: at most one of block_",
        ),
        (
            CNTKBlockMomentumSGD,
            {"block_momentum_as_time_constant": -1},
            "block_momentum_as_time_constant=-1 must be",
        ),
        (BlockMomentumSGD, {"block_learning_rate": -1}, "block_learning_rate=-1 must be"),
        (BlockMomentumSGD, {"use_nesterov_momentum": 1}, "use_nesterov_momentum=1 must be True or"),
        (BlockMomentumSGD, {"reset_sgd_momentum": "no"}, "reset_sgd_momentum='no' must be True or"),
        (SlowMo, {"slow_momentum": 1.0}, "slow_momentum=1.0 must be .* less than 1"),
        (SlowMo, {"slow_learning_rate": math.inf}, "slow_learning_rate=inf must be"),
        (DiLoCo, {"outer_momentum": 2}, "outer_momentum=2 must be"),
        (DiLoCo, {"outer_learning_rate": "fast"}, "outer_learning_rate='fast' must be"),
    ],
)
def test_what_is_refused(kind, options, message):
    with pytest.raises(UserError, match=f"^{message}"):
        kind(**options)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "samples"),
    [
        (ModelAveragingSGD(), 3, 120_000),
        (BlockMomentumSGD(), 4, 480_000),
        (CNTKBlockMomentumSGD(block_samples=7), 4, 7),
        (ModelAveragingSGD(sync_period=9), 2, 18),
        (DiLoCo(), 4, None),
        (SlowMo(sync_steps=3), 4, None),
    ],
)
def test_the_samples_of_a_block(algorithm, ranks, samples):
    assert algorithm.period.samples_on(ranks) == samples


def test_default_periods_in_minibatches():
    assert (DiLoCo().sync_steps, SlowMo().sync_steps) == (500, 48)


def test_block_momentum_by_default_and_as_a_time_constant():
    """A time constant τ and the momentum are the same thing: τ = -block / ln η, where the block is
    of each rank or of all, as its length is given."""

    def momentum(algorithm, samples=10, ranks=4):
        length = algorithm.period.length(samples, ranks)
        return algorithm.outer.momentum_after(Block(samples, length, lr=0.1, ranks=ranks))

    assert momentum(BlockMomentumSGD()) == 0.75
    assert momentum(BlockMomentumSGD(), ranks=1) == 0
    assert momentum(BlockMomentumSGD(block_momentum=0.4)) == 0.4
    tau = -1000 / math.log(0.6)
    for period in ({"block_samples": 1000}, {"sync_steps": 5}):
        timed = BlockMomentumSGD(**period, block_momentum_as_time_constant=tau)
        assert momentum(timed, 1000) == pytest.approx(0.6, abs=1e-15)
        assert momentum(timed, 2000) == pytest.approx(0.36, abs=1e-15)
    cntk = -120_000 / math.log(0.75)
    for kind, ranks in product((BlockMomentumSGD, CNTKBlockMomentumSGD), (1, 2, 3, 64)):
        timed = kind(block_momentum_as_time_constant=cntk)
        block = timed.period.samples_on(ranks)
        assert momentum(timed, block, ranks) == pytest.approx(0.75, abs=1e-15)
    assert momentum(BlockMomentumSGD(block_momentum_as_time_constant=0)) == 0


@pytest.mark.parametrize("kind", [BlockMomentumSGD, CNTKBlockMomentumSGD, SlowMo, DiLoCo])
def test_options_have_one_repr_from_which_they_can_be_made(kind):
    namespace = {each.__name__: each for each in (kind,)}
    algorithm = kind(sync_period=np.int64(40), gradient_bits={0: 32, 10: 1})
    assert eval(repr(algorithm), namespace) == algorithm
    assert hash(algorithm) == hash(kind(sync_period=40, gradient_bits={10: 1, 0: 32}))
