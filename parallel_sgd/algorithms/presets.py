"""Named local updates: each is an outer step with the block length of its paper."""

from __future__ import annotations

from ..options import group, options
from .local_updates import LocalUpdates
from .outer import (
    Averaging,
    BlockMomentum,
    CNTKBlockMomentum,
    OuterNesterov,
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
    default block is 500 minibatches. `overlap_samples` and `merge_weight` are those of Streaming
    DiLoCo: Douillard et al., 2025, section 2.3.
    """

    default_period = BlockPeriod(sync_steps=500)
    outer: OuterStep = group(OuterNesterov)
