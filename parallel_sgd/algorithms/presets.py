"""Local updates by their names: each is an outer step, and the length of its paper's blocks."""

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

    A block is 40,000 samples of each rank if none is given.

    Source: McDonald, Hall, Mann, "Distributed Training Strategies for the Structured Perceptron",
    NAACL 2010; Microsoft CNTK's ModelAveragingSGD, whose mean does not count samples.
    """

    default_period = BlockPeriod(sync_period=40_000)
    outer: OuterStep = group(Averaging)


@options
class BlockMomentumSGD(LocalUpdates):
    """Blockwise model-update filtering, BMUF: momentum over pseudo-gradients (`BlockMomentum`).

    A block is 120,000 samples of each rank if none is given. Blocks of signs (``code="sign"``) do
    not go with a block momentum near 1: what error feedback delays the momentum multiplies, and
    from 0.8 on training may become unstable. 4 bits were as good as 32 wherever we measured
    (docs/experiments.md).
    """

    default_period = BlockPeriod(sync_period=120_000)
    outer: OuterStep = group(BlockMomentum)


@options
class CNTKBlockMomentumSGD(LocalUpdates):
    """Block momentum as CNTK computes it (`CNTKBlockMomentum`), to reproduce what was trained with
    CNTK. A block is 120,000 samples of each rank if none is given."""

    default_period = BlockPeriod(sync_period=120_000)
    outer: OuterStep = group(CNTKBlockMomentum)


@options
class SlowMo(LocalUpdates):
    """Slow momentum over pseudo-gradients in units of the local learning rate (`SlowMomentum`).

    A block is 48 minibatches if none is given, as in the paper's ImageNet runs.
    """

    default_period = BlockPeriod(sync_steps=48)
    outer: OuterStep = group(SlowMomentum)


@options
class DiLoCo(LocalUpdates):
    """Long blocks of local Adam, and Nesterov momentum over pseudo-gradients (`OuterNesterov`).

    The local optimizer is meant to be Adam with weight decay (`psgd.Adam`), each rank's own. A
    block is 500 minibatches if none is given. `overlap_samples` and `merge_weight` are those of
    Streaming DiLoCo: Douillard et al., 2025, section 2.3.
    """

    default_period = BlockPeriod(sync_steps=500)
    outer: OuterStep = group(OuterNesterov)
