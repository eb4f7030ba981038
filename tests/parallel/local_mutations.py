"""Faults of local updates that the tests must notice: see `mutations`."""

from __future__ import annotations

from mutations import Mutation, nothing

from parallel_sgd.algorithms import (
    Averaging,
    BlockMomentum,
    LocalUpdates,
    OuterNesterov,
    OuterStep,
    SlowMomentum,
)
from parallel_sgd.exchange import Exchange
from parallel_sgd.kernels import body

EQUATIONS = [
    f"equations, {name}"
    for name in ("averaging, block", "block momentum", "CNTK", "SlowMo", "DiLoCo", "overlap")
]
OVERLAP = "equations, overlap, SlowMo"
WITH_MOMENTUM = ["equations, block momentum", "equations, SlowMo", "equations, DiLoCo"]


def negated(right, self, model, momentum, gradient, block):
    gradient *= -1
    right(self, model, momentum, gradient, block)


def forgetful(right, self, model, momentum, *arguments):
    momentum.fill(0)
    right(self, model, momentum, *arguments)


def cntk_nesterov(right, self, model, momentum, gradient, block):
    eta, zeta = self.momentum_after(block), self.block_learning_rate
    rate = 1 + eta if self.use_nesterov_momentum else 1.0
    body(model).outer_momentum_step(model, momentum, gradient, rate, eta, zeta, False)


def stale_start(right, self, state, *arguments, **options):
    """Φ stays what it was, and only the model moves on."""
    before = state.start.copy()
    right(self, state, *arguments, **options)
    state.start[:] = before


def next_rate(right, self, state, gradient, samples, lr, work):
    """γ is not the block's rate, but that of the step that follows."""
    return right(self, state, gradient, samples, work.optimizer.lr, work)


def own_samples_decide(right, self, state, x, work, term):
    right(self, state, x, work, term)
    state.block_samples = work.comm.size * state.own_samples


def captured_too_early(right, self, state, *arguments):
    """As CNTK does: what the warm start has learnt enters the first pseudo-gradient."""
    state.warm = False
    right(self, state, *arguments)


def without_the_rest(right, self, state, work):
    work.parameters.flat[:] = state.start


def remembers_while_the_rate_is_0(right, self, model, momentum, gradient, block):
    before = momentum.copy()
    right(self, model, momentum, gradient, block)
    if block.lr == 0:
        momentum[:] = before


def merged_at_the_new_rate(right, self, state, work):
    state.sent_lr = state.lr
    right(self, state, work)


def not_merged_between_blocks(right, self, state, work):
    if state.block_samples == 0:
        state.sent_samples = 0
    right(self, state, work)


def merged_at_once(right, self, state, work, **options):
    right(self, state, work, **options)
    if state.sent_samples:
        self._merge(state, work)


LOCAL_MUTATIONS = [
    Mutation("no exchange", Exchange, "sum", nothing, EQUATIONS),
    *(
        Mutation(f"flipped sign, {kind.__name__}", kind, "step", negated, checks)
        for kind, checks in (
            (Averaging, ["equations, averaging, block", "averaging and data-parallel"]),
            (BlockMomentum, ["equations, block momentum", "block momentum and momentum"]),
            (SlowMomentum, ["equations, SlowMo"]),
            (OuterNesterov, ["equations, DiLoCo"]),
        )
    ),
    *(
        Mutation(f"forgotten momentum, {kind.__name__}", kind, "step", forgetful, checks)
        for kind, checks in (
            (BlockMomentum, ["equations, block momentum", "block momentum and momentum"]),
            (SlowMomentum, ["equations, SlowMo", "SlowMo and classical"]),
            (OuterNesterov, ["equations, DiLoCo", "DiLoCo and Nesterov"]),
        )
    ),
    Mutation(
        "CNTK's Nesterov",
        BlockMomentum,
        "step",
        cntk_nesterov,
        ["equations, block momentum", "block momentum and momentum", "DiLoCo and Nesterov"],
    ),
    Mutation(
        "sum instead of mean",
        OuterStep,
        "weight",
        lambda *_: 1.0,
        ["equations, averaging, block", "averaging and data-parallel"],
    ),
    Mutation(
        "mean that does not count samples",
        OuterStep,
        "weight",
        lambda *_: 1 / 3,
        ["equations, averaging, block", "averaging and data-parallel"],
    ),
    Mutation("stale Φ", LocalUpdates, "_synchronize", stale_start, WITH_MOMENTUM),
    Mutation(
        "the rate of the step that follows",
        LocalUpdates,
        "_outer_step",
        next_rate,
        ["equations, SlowMo"],
    ),
    Mutation(
        "η from the rank's own samples",
        LocalUpdates,
        "_weigh",
        own_samples_decide,
        ["equations, time constant"],
    ),
    Mutation(
        "Φ taken before the warm start ends",
        LocalUpdates,
        "step",
        captured_too_early,
        ["equations, warm start"],
    ),
    Mutation(
        "inner state kept where it is to be zeroed",
        BlockMomentum,
        "inner_state",
        lambda *_: "keep",
        ["equations, block momentum"],
    ),
    Mutation(
        "no last synchronization",
        LocalUpdates,
        "finish",
        without_the_rest,
        [check for check in EQUATIONS if "SlowMo" not in check],  # its rate has fallen to 0
    ),
    Mutation(
        "no decay while the rate is 0",
        SlowMomentum,
        "step",
        remembers_while_the_rate_is_0,
        [OVERLAP],
    ),
    Mutation(
        "the rate of the next block", LocalUpdates, "_merge", merged_at_the_new_rate, [OVERLAP]
    ),
    Mutation(
        "no last merge at the end of a block",
        LocalUpdates,
        "finish",
        not_merged_between_blocks,
        [OVERLAP],
    ),
    Mutation("no delay", LocalUpdates, "_synchronize", merged_at_once, ["equations, overlap"]),
]
