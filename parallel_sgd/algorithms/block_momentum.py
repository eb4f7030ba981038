"""Blockwise model-update filtering (BMUF): momentum over block gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..errors import UserError
from ..kernels import body
from ..validation import choice, number, settle, shown
from .algorithm import Array
from .local_updates import InnerState, LocalUpdates, LocalUpdateState


@dataclass(frozen=True, kw_only=True)
class BlockMomentumSGD(LocalUpdates):
    """Δ = block_momentum * Δ + block_learning_rate * G, then, with Nesterov's form (the default),

        Φ = Φ - (block_learning_rate * G + block_momentum * Δ)

    or, in the classical form, Φ = Φ - Δ.

    Args:
        block_momentum: in [0, 1); 1 - 1/K on K ranks if no time constant is given either.
        block_momentum_as_time_constant: instead, in samples as the block's length is: of each rank
            with `sync_period` (as the default), of all ranks with `block_samples` and `sync_steps`.
            block_momentum = exp(-samples of the block / time constant).
        block_learning_rate: multiplies the block gradient, 1 by default.
        use_nesterov_momentum: Nesterov's form or the classical one.
        reset_sgd_momentum: whether a synchronization zeroes the local optimizer's state.

    The other options are those of `LocalUpdates`; a block is 120,000 samples of each rank if none
    is given. A constant block gradient G moves the model by block_learning_rate /
    (1 - block_momentum) * G a block, in both forms: with the defaults by K * G, as if the ranks'
    updates were added up. Compare algorithms at equal gain, or tune each.

    Blocks of 1 or 2 bits do not go with a block momentum near 1: what error feedback delays the
    momentum multiplies, and from 0.8 on training may become unstable. 4 bits were as good as 32
    wherever we measured (docs/experiments.md).

    Source: Chen, Huo, "Scalable Training of Deep Learning Machines by Incremental Block Training
    with Intra-Block Parallel Optimization and Blockwise Model-Update Filtering", ICASSP 2016, eq. 6
    to 8. Unlike CNTK's and fairseq's, Nesterov's form is the paper's (see
    `CNTKBlockMomentumSGD`), and the momentum comes from the samples of all ranks (with
    `sync_period` from their mean), so that uneven data cannot make the ranks differ. CNTK's
    options are of all ranks, both, and it divides both by their number.
    """

    default_period: ClassVar[dict[str, int]] = {"sync_period": 120_000}

    block_momentum: float | None = None
    block_momentum_as_time_constant: float | None = None
    block_learning_rate: float = 1.0
    use_nesterov_momentum: bool = True
    reset_sgd_momentum: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        momentum, tau = self.block_momentum, self.block_momentum_as_time_constant
        if momentum is not None and tau is not None:
            raise UserError(
                f"block_momentum={shown(momentum)} and block_momentum_as_time_constant="
                f"{shown(tau)}: at most one of them may be given"
            )
        if momentum is not None:
            momentum = number("block_momentum", momentum, 0, below=1)
        if tau is not None:
            tau = number("block_momentum_as_time_constant", tau, 0)
        zeta = number("block_learning_rate", self.block_learning_rate, 0)
        nesterov = choice("use_nesterov_momentum", self.use_nesterov_momentum, (True, False))
        reset = choice("reset_sgd_momentum", self.reset_sgd_momentum, (True, False))
        settle(
            self,
            block_momentum=momentum,
            block_momentum_as_time_constant=tau,
            block_learning_rate=zeta,
            use_nesterov_momentum=nesterov,
            reset_sgd_momentum=reset,
        )

    @property
    def inner_policy(self) -> InnerState:
        return "zero" if self.reset_sgd_momentum else "keep"

    def block_momentum_for(self, samples: int, ranks: int) -> float:
        """The block momentum after a block of so many samples of all ranks."""
        tau = self.block_momentum_as_time_constant
        if tau is not None:
            length = samples if self.sync_period is None else samples / ranks
            return math.exp(-length / tau) if tau > 0 else 0.0
        return 1 - 1 / ranks if self.block_momentum is None else self.block_momentum

    def outer_step(
        self, state: LocalUpdateState, block_gradient: Array, samples: int, lr: float, ranks: int
    ) -> None:
        body(state.start).momentum_step(
            state.start,
            state.momentum,
            block_gradient,
            1.0,
            self.block_momentum_for(samples, ranks),
            self.block_learning_rate,
            self.use_nesterov_momentum,
        )


@dataclass(frozen=True, kw_only=True)
class CNTKBlockMomentumSGD(BlockMomentumSGD):
    """Block momentum as CNTK computes it, to reproduce what was trained with CNTK:

        Δ = block_momentum * Δ + (1 - block_momentum) * block_learning_rate * sum_k (Φ - x_k)
        Φ = Φ - (1 + block_momentum) * Δ       or, without Nesterov, Φ - Δ

    The ranks' updates are added, not averaged, and do not count samples. At block_momentum =
    1 - 1/K and even data the first line is the paper's. The second is no Nesterov momentum: it is
    the classical form with a learning rate 1 + block_momentum times as large. Options as for
    `BlockMomentumSGD`. A constant mean update G moves the model by
    (1 + block_momentum) * block_learning_rate * K * G a block.

    Source: Microsoft CNTK 2.7, BlockMomentumDistributedLearner.h. Unlike there, the momentum of a
    time constant comes from the samples that all ranks have had in the block, not from the length
    that it should have: the same wherever minibatches fill blocks exactly.
    """

    def share(self, own_samples: int, samples: int) -> float:
        return 1.0

    def outer_step(
        self, state: LocalUpdateState, block_gradient: Array, samples: int, lr: float, ranks: int
    ) -> None:
        momentum = self.block_momentum_for(samples, ranks)
        body(state.start).momentum_step(
            state.start,
            state.momentum,
            block_gradient,
            1 + momentum if self.use_nesterov_momentum else 1.0,
            momentum,
            (1 - momentum) * self.block_learning_rate,
            False,
        )
