"""Outer steps of local updates: how the common model moves at the end of a block.

Φ is the common model [n]. G is the pseudo-gradient of a block: the decrease of Φ by the ranks'
local steps, averaged over the ranks. An outer step changes Φ, and a momentum [n] of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple

from ..kernels import body
from ..options import Choice, Options, Real, Whole, option, options
from ..parameters import Parameters

Array = Any  #: a NumPy or CuPy array

InnerState = Literal["keep", "zero", "average"]

SECOND_MOMENTS = ("v", "s", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""Names of vectors of squared gradients: of this package's optimizers, and of PyTorch's."""

SMALLEST_LR = 1e-30
"""SlowMo takes smaller learning rates as 0, because G / lr could overflow float32."""


class Block(NamedTuple):
    """The facts of a block for its outer step.

    Attributes:
        samples: of all ranks in the block.
        length: the samples as the period counts them: of all ranks, or of each rank.
        lr: the local optimizer's learning rate in its last step, for the mean gradient of as many
            samples as a rank has on average; 0 unless the outer step `divides_by_rate`.
        ranks: number of ranks.
    """

    samples: int
    length: float
    lr: float
    ranks: int


class OuterStep(Options, ABC):
    """An outer step with its options: `init` and `step`.

    Attributes:
        divides_by_rate: True if `step` uses `Block.lr`.
        has_momentum: True if `step` has a momentum.
    """

    divides_by_rate: ClassVar[bool] = False
    has_momentum: ClassVar[bool] = True

    @property
    @abstractmethod
    def inner_state(self) -> InnerState:
        """Treatment of the local optimizer's state at the end of a block: keep, zero or average."""

    @property
    def reset_options(self) -> tuple[str, str]:
        """The options that zero and keep the local optimizer's state, for messages."""
        return "inner_state='zero'", "inner_state='keep'"

    def init(self, model: Parameters) -> Array | None:
        """Return the momentum before the first block: zeros [n], or None. Local."""
        return model.like().flat if self.has_momentum else None

    @abstractmethod
    def step(self, model: Array, momentum: Array | None, gradient: Array, block: Block) -> None:
        """Change Φ [n] and the momentum [n] by G [n], and write the new Φ to G's memory too.

        Local. Cost: one pass over memory.
        """

    def averages(self, name: str, blocks: int) -> bool:
        """Return True if a vector of the local optimizer is averaged after a block. Local.

        Args:
            name: of the vector, such as "m".
            blocks: ended so far.
        """
        return True

    def weight(self, own_samples: int, samples: int) -> float:
        """Return the weight of this rank's model in G. Local.

        Args:
            own_samples: of this rank in the block.
            samples: of all ranks in the block.
        """
        return own_samples / samples


@options
class OuterStepWithInnerState(OuterStep):
    """An outer step with an option for the local optimizer's state.

    A rank without samples so far contributes zeros to the average, and receives the average.
    """

    inner_state: InnerState = option(
        "keep",
        Choice("keep", "zero", "average"),
        "what happens to the local optimizer's state at the end of a block; average costs one "
        "more 32-bit exchange for each of its vectors",
    )


@options
class Averaging(OuterStepWithInnerState):
    """Model averaging: Φ ← Φ - G, the mean of the ranks' models by samples.

    Φ becomes sum_k n_k x_k / N. A constant G moves the model by G a block.
    """

    has_momentum = False

    def step(self, model: Array, momentum: Array | None, gradient: Array, block: Block) -> None:
        body(model).averaging_step(model, gradient)


@options
class OuterSGD(OuterStepWithInnerState):
    """Plain outer SGD: Φ ← Φ - outer_learning_rate G.

    A constant G moves the model by outer_learning_rate G a block.

    Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025 (arXiv
    2508.15706), algorithm 1.
    """

    has_momentum = False

    outer_learning_rate: float = option(1.0, Real(), "the paper's alpha")

    def step(self, model: Array, momentum: Array | None, gradient: Array, block: Block) -> None:
        if self.outer_learning_rate != 1:
            gradient *= self.outer_learning_rate
        body(model).averaging_step(model, gradient)


@options
class DesyncedAveraging(OuterStep):
    """Model averaging with periods of their own for the local optimizer's moments.

    Φ ← Φ - G after every block; the first and second moments are averaged after every so many
    blocks. The moments change more slowly than the model, so they need fewer exchanges: of
    Adam's vectors 1 + 1/3 + 1/6 a block, instead of 3.

    Source: Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training
    Foundation Models", ICLR 2026 (arXiv 2505.22549), algorithm 1: K_u and K_v are in units of K_x.
    """

    has_momentum = False

    first_moment_every: int = option(
        3, Whole(1), "blocks between two averages of the first moment (momentum)"
    )
    second_moment_every: int = option(
        6, Whole(1), "blocks between two averages of the second moment"
    )

    @property
    def inner_state(self) -> InnerState:
        return "average"

    def step(self, model: Array, momentum: Array | None, gradient: Array, block: Block) -> None:
        body(model).averaging_step(model, gradient)

    def averages(self, name: str, blocks: int) -> bool:
        every = self.second_moment_every if name in SECOND_MOMENTS else self.first_moment_every
        return blocks % every == 0


@options
class BlockMomentum(OuterStep):
    """Blockwise model-update filtering: Δ ← block_momentum Δ + block_learning_rate G.

    Then, in Nesterov's form (the default),

        Φ ← Φ - (block_learning_rate G + block_momentum Δ)

    or, in the classical form, Φ ← Φ - Δ.

    A constant G moves the model by block_learning_rate / (1 - block_momentum) G a block, in both
    forms. With the defaults this is K G on K ranks, as if the ranks' updates were added. Compare
    algorithms at equal gain, or tune each.

    Source: Chen, Huo, "Scalable Training of Deep Learning Machines by Incremental Block Training
    with Intra-Block Parallel Optimization and Blockwise Model-Update Filtering", ICASSP 2016, eq. 6
    to 8. Unlike CNTK's and fairseq's, Nesterov's form is the paper's, and the momentum comes from
    the samples of all ranks (with `sync_period` from their mean), so that uneven data cannot make
    the ranks differ.
    """

    block_momentum: float | None = option(
        None, Real(below=1), "in [0, 1); 1 - 1/K on K ranks if no time constant is given"
    )
    block_momentum_as_time_constant: float | None = option(
        None,
        Real(),
        "instead of block_momentum, in samples: of each rank with sync_period (the default), of "
        "all ranks with block_samples and sync_steps; block_momentum = exp(-samples of the "
        "block / time constant)",
    )
    block_learning_rate: float = option(1.0, Real(), "factor of the pseudo-gradient")
    use_nesterov_momentum: bool = option(
        True, Choice(True, False), "use Nesterov's form, not the classical form"
    )
    reset_sgd_momentum: bool = option(
        True, Choice(True, False), "zero the local optimizer's state at the end of each block"
    )

    def __post_init__(self) -> None:
        self.require_at_most_one("block_momentum", "block_momentum_as_time_constant")
        super().__post_init__()

    @property
    def inner_state(self) -> InnerState:
        return "zero" if self.reset_sgd_momentum else "keep"

    @property
    def reset_options(self) -> tuple[str, str]:
        return "reset_sgd_momentum=True", "reset_sgd_momentum=False"

    def momentum_after(self, block: Block) -> float:
        """Return the block momentum after a block."""
        tau = self.block_momentum_as_time_constant
        if tau is not None:
            return math.exp(-block.length / tau) if tau > 0 else 0.0
        return 1 - 1 / block.ranks if self.block_momentum is None else self.block_momentum

    def step(self, model: Array, momentum: Array | None, gradient: Array, block: Block) -> None:
        eta, zeta = self.momentum_after(block), self.block_learning_rate
        nesterov = self.use_nesterov_momentum
        body(model).outer_momentum_step(model, momentum, gradient, 1.0, eta, zeta, nesterov)


@options
class CNTKBlockMomentum(BlockMomentum):
    """Block momentum as CNTK computes it, to reproduce training by CNTK:

        Δ ← block_momentum Δ + (1 - block_momentum) block_learning_rate sum_k (Φ - x_k)
        Φ ← Φ - (1 + block_momentum) Δ       or, without Nesterov, Φ - Δ

    The ranks' updates are added, not averaged, without weights by samples. At block_momentum = 1 -
    1/K and even data the first line equals the paper's. The second line is no Nesterov momentum,
    but the classical form with a learning rate 1 + block_momentum times as large. A constant mean
    update G moves the model by (1 + block_momentum) block_learning_rate K G a block.

    Source: Microsoft CNTK 2.7, BlockMomentumDistributedLearner.h. Unlike CNTK, the momentum of a
    time constant comes from the actual samples of all ranks in the block, not from the block's
    nominal length. Both are the same if minibatches fill blocks exactly. CNTK's options count the
    samples of all ranks, and CNTK divides both by the number of ranks.
    """

    def weight(self, own_samples: int, samples: int) -> float:
        return 1.0

    def step(self, model: Array, momentum: Array | None, gradient: Array, block: Block) -> None:
        eta = self.momentum_after(block)
        lr, zeta = 1 + eta if self.use_nesterov_momentum else 1.0, self.block_learning_rate
        body(model).outer_momentum_step(model, momentum, gradient, lr, eta, (1 - eta) * zeta, False)


@options
class SlowMomentum(OuterStepWithInnerState):
    """Slow momentum over pseudo-gradients, in units of the local learning rate.

        u ← slow_momentum u + G / lr;  Φ ← Φ - slow_learning_rate lr u

    lr is the local optimizer's learning rate in the block (of its last step, if the rate changes
    within the block). The rate is for a mean gradient, times a session's factor; a rate per sample
    is multiplied by N / K too.

    While lr is constant this is classical block momentum. When lr falls, the momentum's memory
    falls in proportion. At lr = 0 the limit holds: Φ moves by slow_learning_rate G, and u remembers
    nothing of this block. A constant G moves the model by slow_learning_rate / (1 - slow_momentum)
    G a block.

    Source: Wang, Tantia, Ballas, Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD
    with Slow Momentum", ICLR 2020, algorithm 1.
    """

    divides_by_rate = True

    slow_momentum: float = option(0.5, Real(below=1), "in [0, 1); the paper's beta")
    slow_learning_rate: float = option(1.0, Real(), "the paper's alpha")

    def step(self, model: Array, momentum: Array | None, gradient: Array, block: Block) -> None:
        alpha, beta, lr = self.slow_learning_rate, self.slow_momentum, block.lr
        if lr < SMALLEST_LR:
            assert momentum is not None
            gradient *= alpha
            body(model).averaging_step(model, gradient)
            momentum *= beta
            return
        body(model).outer_momentum_step(model, momentum, gradient, alpha * lr, beta, 1 / lr, False)


@options
class OuterNesterov(OuterStepWithInnerState):
    """Nesterov momentum over pseudo-gradients.

        m ← outer_momentum m + G;  Φ ← Φ - outer_learning_rate (G + outer_momentum m)

    A constant G moves the model by outer_learning_rate / (1 - outer_momentum) G a block.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    2023, algorithm 1, with PyTorch's form of Nesterov momentum.
    """

    outer_learning_rate: float = option(0.7, Real(), "0.7 in the paper")
    outer_momentum: float = option(0.9, Real(below=1), "in [0, 1); 0.9 in the paper")

    def step(self, model: Array, momentum: Array | None, gradient: Array, block: Block) -> None:
        lr, mu = self.outer_learning_rate, self.outer_momentum
        body(model).outer_momentum_step(model, momentum, gradient, lr, mu, 1.0, True)
