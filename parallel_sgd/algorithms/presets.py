"""Named local updates: each is an outer step with the block length of its paper."""

from __future__ import annotations

from ..exchange import ExchangeOptions
from ..options import group, options
from .local_updates import LocalUpdates
from .outer import (
    Averaging,
    BlockMomentum,
    CNTKBlockMomentum,
    DesyncedAveraging,
    OuterNesterov,
    OuterSGD,
    OuterStep,
    SlowMomentum,
)
from .period import BlockPeriod


@options
class ModelAveragingSGD(LocalUpdates):
    """Model averaging: every block ends with the mean of the ranks' models (`Averaging`).

    The default block is 40,000 samples of each rank.

    Source: McDonald, Hall, Mann, "Distributed Training Strategies for the Structured Perceptron",
    NAACL 2010; Microsoft CNTK's ModelAveragingSGD, whose mean does not count samples.
    """

    default_period = BlockPeriod(sync_period=40_000)
    outer: OuterStep = group(Averaging)


@options
class BlockMomentumSGD(LocalUpdates):
    """Blockwise model-update filtering, BMUF: momentum over pseudo-gradients (`BlockMomentum`).

    The default block is 120,000 samples of each rank. Blocks of signs (``code="sign"``) do not go
    with a block momentum near 1: the momentum multiplies the delay of error feedback, and from 0.8
    on training may become unstable. 4 bits were as good as 32 wherever we measured
    (docs/experiments.md).
    """

    default_period = BlockPeriod(sync_period=120_000)
    outer: OuterStep = group(BlockMomentum)


@options
class CNTKBlockMomentumSGD(LocalUpdates):
    """Block momentum as CNTK computes it (`CNTKBlockMomentum`), to reproduce training by CNTK.

    The default block is 120,000 samples of each rank.
    """

    default_period = BlockPeriod(sync_period=120_000)
    outer: OuterStep = group(CNTKBlockMomentum)


@options
class SlowMo(LocalUpdates):
    """Slow momentum over pseudo-gradients in units of the local learning rate (`SlowMomentum`).

    The default block is 48 minibatches, as in the paper's ImageNet runs.
    """

    default_period = BlockPeriod(sync_steps=48)
    outer: OuterStep = group(SlowMomentum)


@options
class DiLoCo(LocalUpdates):
    """Long blocks of local Adam, and Nesterov momentum over pseudo-gradients (`OuterNesterov`).

    The intended local optimizer is Adam with weight decay (`psgd.Adam`), separate on each rank. The
    default block is 500 minibatches. `fragments`, `overlap_samples` and `merge_weight` are those of
    Streaming DiLoCo: Douillard et al., 2025 (arXiv 2501.18512), sections 2.1 to 2.3; its
    fragments are of every P-th layer, ours of consecutive parameters.
    """

    default_period = BlockPeriod(sync_steps=500)
    outer: OuterStep = group(OuterNesterov)


@options
class SparseLoCo(LocalUpdates):
    """Long blocks of local Adam, and few bits of a pseudo-gradient with a decaying residual.

        e_k ← 0.95 e_k + n_k / N (Φ - x_k);  q_k = codec(e_k);  e_k ← e_k - q_k
        Φ ← Φ - outer_learning_rate sum_k q_k

    Error feedback takes the place of an outer momentum (`OuterSGD`). The sum is encoded once more
    on its way back, with a residual of its own that decays likewise. The default codec is the
    entropy code with a quarter of a bit; the paper's is ``code="top-k", gradient_bits=0.22,
    block_size=4096``: 64 of 4096 values, with 2 bits each. The intended local optimizer is Adam
    with weight decay (`psgd.Adam`), separate on each rank. The default block is 30 minibatches; the
    paper has 15 to 250.

    Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025 (arXiv
    2508.15706), algorithm 1; Covenant-72B, 2026 (arXiv 2603.08163). Theirs sends every rank's
    message to all ranks, unchanged: K / 2 times the bytes on K ranks.
    """

    default_period = BlockPeriod(sync_steps=30)
    outer: OuterStep = group(OuterSGD)
    exchange: ExchangeOptions = group(ExchangeOptions, gradient_bits=0.25, residual_decay=0.95)


@options
class DESLOC(LocalUpdates):
    """Model averaging over local Adam, whose moments are averaged less often than the model
    (`DesyncedAveraging`).

    The default block is 64 minibatches; the first moment is averaged after every third block, the
    second moment after every sixth.

    Source: Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training
    Foundation Models", ICLR 2026 (arXiv 2505.22549).
    """

    default_period = BlockPeriod(sync_steps=64)
    outer: OuterStep = group(DesyncedAveraging)
