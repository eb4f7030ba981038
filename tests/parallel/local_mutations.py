"""Faults of local updates that the tests must notice: see `mutations`."""

from __future__ import annotations

from mutations import Mutation, nothing

from parallel_sgd import MomentumSGD
from parallel_sgd.algorithms import (
    Averaging,
    BlockMomentum,
    DesyncedAveraging,
    LocalUpdates,
    OuterNesterov,
    OuterSGD,
    OuterStep,
    SlowMomentum,
)
from parallel_sgd.algorithms.period import WHOLE
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


def next_rate(right, self, state, fragment, gradient, samples, lr, work):
    """γ is not the block's rate, but that of the step that follows."""
    return right(self, state, fragment, gradient, samples, work.optimizer.lr, work)


def own_samples_decide(right, self, state, fragment, work, term):
    right(self, state, fragment, work, term)
    fragment.samples = work.comm.size * fragment.own_samples


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


def merged_at_the_new_rate(right, self, state, fragment, work):
    fragment.sent_lr = state.lr
    right(self, state, fragment, work)


def not_merged_between_blocks(right, self, state, work):
    for fragment in state.parts:
        if fragment.samples == 0:
            fragment.sent_samples = 0
    right(self, state, work)


def merged_at_once(right, self, state, fragment, work, **options):
    right(self, state, fragment, work, **options)
    if fragment.sent_samples:
        self._merge(state, fragment, work)


def all_blocks_begin_together(right, self, fragment):
    return WHOLE


def all_blocks_are_short(right, self, fragment):
    fragment.is_first = True
    return right(self, fragment)


def never_desynced(right, self, name, blocks):
    return True


def first_for_second(right, self, name, blocks):
    return right(self, "m", blocks)


def whole_model_is_mixed(right, self, state, fragment, work):
    right(self, state, fragment, work)
    work.parameters.flat[:] = state.start


def only_the_first_part(right, self, vector, residuals=None, is_ready=None, part=0):
    right(self, vector, residuals, is_ready)


def whole_state_is_zeroed(right, self, state, values):
    self.reset(state)


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
    Mutation(
        "no rate of the outer SGD",
        OuterSGD,
        "step",
        lambda right, self, *arguments: right(OuterSGD(), *arguments),
        ["equations, SparseLoCo"],
    ),
    Mutation("flipped sign, OuterSGD", OuterSGD, "step", negated, ["equations, SparseLoCo"]),
    Mutation(
        "moments averaged after every block",
        DesyncedAveraging,
        "averages",
        never_desynced,
        ["equations, DES-LOC", "equations, fragments, averaged"],
    ),
    Mutation(
        "the second moment at the period of the first",
        DesyncedAveraging,
        "averages",
        first_for_second,
        ["equations, DES-LOC", "equations, fragments, averaged"],
    ),
    Mutation(
        "fragments that end together",
        LocalUpdates,
        "_length",
        all_blocks_begin_together,
        ["equations, fragments", "equations, fragments, overlap"],
    ),
    Mutation(
        "only short blocks of fragments",
        LocalUpdates,
        "_length",
        all_blocks_are_short,
        ["equations, fragments", "equations, fragments, overlap"],
    ),
    Mutation(
        "a merge of the whole model",
        LocalUpdates,
        "_merge",
        whole_model_is_mixed,
        ["equations, fragments, overlap"],
    ),
    Mutation(
        "the whole local state zeroed after a fragment's block",
        MomentumSGD,
        "reset_part",
        whole_state_is_zeroed,
        ["equations, fragments by samples"],
    ),
    Mutation(
        "only the first fragment exchanged",
        Exchange,
        "sum",
        only_the_first_part,
        ["equations, fragments"],
    ),
]
