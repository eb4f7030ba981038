"""Faults of local updates that the tests must notice: see `mutations`."""

from __future__ import annotations

from typing import Any

from mutations import Mutation

from parallel_sgd import BlockMomentumSGD, DiLoCo, ModelAveragingSGD, SlowMo
from parallel_sgd.algorithms import LocalUpdates
from parallel_sgd.exchange import Exchange
from parallel_sgd.kernels import body

EQUATIONS = [
    f"equations, {name}"
    for name in ("averaging, block", "block momentum", "CNTK", "SlowMo", "DiLoCo", "overlap")
]
WITH_MOMENTUM = ["equations, block momentum", "equations, SlowMo", "equations, DiLoCo"]


def negated(right: Any) -> Any:
    def outer_step(self, state, block_gradient, *arguments):
        right(self, state, -block_gradient, *arguments)

    return outer_step


def forgetful(right: Any) -> Any:
    def outer_step(self, state, *arguments):
        state.momentum.fill(0)
        right(self, state, *arguments)

    return outer_step


def cntk_nesterov(right: Any) -> Any:
    def outer_step(self, state, block_gradient, samples, lr, ranks):
        eta = self.block_momentum_for(samples, ranks)
        rate = 1 + eta if self.use_nesterov_momentum else 1.0
        arguments = state.start, state.momentum, block_gradient
        body(state.start).momentum_step(*arguments, rate, eta, self.block_learning_rate, False)

    return outer_step


def stale_start(right: Any) -> Any:
    """Φ stays what it was, and only the model moves on."""

    def synchronize(self, state, *arguments, **options):
        before = state.start.copy()
        right(self, state, *arguments, **options)
        state.start[:] = before

    return synchronize


def next_rate(right: Any) -> Any:
    """γ is not the block's rate, but that of the step that follows."""

    def close(self, state, block_gradient, samples, lr, local_step, comm):
        right(self, state, block_gradient, samples, local_step.lr, local_step, comm)

    return close


def own_samples_decide(right: Any) -> Any:
    def weigh(self, state, x, clock, comm):
        right(self, state, x, clock, comm)
        state.block_samples = comm.size * state.own_samples

    return weigh


def captured_too_early(right: Any) -> Any:
    """As CNTK does: what the warm start has learnt enters the first block gradient."""

    def step(self, state, parameters, gradient, samples, local_step, comm, total=None):
        before = state.start.copy()
        warm = not self.distributed(local_step.samples)
        total = right(self, state, parameters, gradient, samples, local_step, comm, total)
        if warm:
            state.start[:] = before
        return total

    return step


def without_the_rest(right: Any) -> Any:
    def finish(self, state, parameters, local_step, comm):
        parameters.flat[:] = state.start

    return finish


def merged_at_once(right: Any) -> Any:
    def synchronize(self, state, *arguments, **options):
        right(self, state, *arguments, **options)
        if state.sent_samples:
            self._merge(state, *arguments)

    return synchronize


LOCAL_MUTATIONS = [
    Mutation("no exchange", Exchange, "sum", lambda right: lambda *_: None, EQUATIONS),
    *(
        Mutation(f"flipped sign, {kind.__name__}", kind, "outer_step", negated, checks)
        for kind, checks in (
            (ModelAveragingSGD, ["equations, averaging, block", "averaging and data-parallel"]),
            (BlockMomentumSGD, ["equations, block momentum", "block momentum and momentum"]),
            (SlowMo, ["equations, SlowMo"]),
            (DiLoCo, ["equations, DiLoCo"]),
        )
    ),
    *(
        Mutation(f"forgotten momentum, {kind.__name__}", kind, "outer_step", forgetful, checks)
        for kind, checks in (
            (BlockMomentumSGD, ["equations, block momentum", "block momentum and momentum"]),
            (SlowMo, ["equations, SlowMo", "SlowMo and classical"]),
            (DiLoCo, ["equations, DiLoCo", "DiLoCo and Nesterov"]),
        )
    ),
    Mutation(
        "CNTK's Nesterov",
        BlockMomentumSGD,
        "outer_step",
        cntk_nesterov,
        ["equations, block momentum", "block momentum and momentum", "DiLoCo and Nesterov"],
    ),
    Mutation(
        "sum instead of mean",
        LocalUpdates,
        "share",
        lambda right: lambda self, own, samples: 1.0,
        ["equations, averaging, block", "averaging and data-parallel", "identical data, blocks"],
    ),
    Mutation(
        "mean that does not count samples",
        LocalUpdates,
        "share",
        lambda right: lambda self, own, samples: 1 / 3,
        ["equations, averaging, block", "averaging and data-parallel"],
    ),
    Mutation("stale Φ", LocalUpdates, "_synchronize", stale_start, WITH_MOMENTUM),
    Mutation(
        "the rate of the step that follows",
        LocalUpdates,
        "_close",
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
        BlockMomentumSGD,
        "inner_policy",
        lambda right: property(lambda self: "keep"),
        ["equations, block momentum"],
    ),
    Mutation(
        "no last synchronization",
        LocalUpdates,
        "finish",
        without_the_rest,
        [check for check in EQUATIONS if "SlowMo" not in check],  # its rate has fallen to 0
    ),
    Mutation("no delay", LocalUpdates, "_synchronize", merged_at_once, ["equations, overlap"]),
]
