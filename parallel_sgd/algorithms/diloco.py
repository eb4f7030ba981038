"""DiLoCo: long blocks of local Adam, and Nesterov momentum over block gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..kernels import body
from ..validation import number, settle
from .algorithm import Array
from .local_updates import LocalUpdateState, LocalUpdatesWithInnerState


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalUpdatesWithInnerState):
    """m = outer_momentum * m + G;  Φ = Φ - outer_learning_rate * (G + outer_momentum * m)

    Args:
        outer_learning_rate: 0.7 in the paper.
        outer_momentum: in [0, 1); 0.9 in the paper.

    The local optimizer is meant to be Adam with weight decay (`psgd.Adam`), each rank's own. The
    other options are those of `LocalUpdates`; a block is 500 minibatches if none is given. A
    constant block gradient G moves the model by outer_learning_rate / (1 - outer_momentum) * G a
    block. `overlap_samples` and `merge_weight` are those of Streaming DiLoCo.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    2023, algorithm 1, with PyTorch's form of Nesterov momentum; Douillard et al., "Streaming DiLoCo
    with overlapping communication", 2025, section 2.3.
    """

    default_period: ClassVar[dict[str, int]] = {"sync_steps": 500}

    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(
            self,
            outer_learning_rate=number("outer_learning_rate", self.outer_learning_rate, 0),
            outer_momentum=number("outer_momentum", self.outer_momentum, 0, below=1),
        )

    def outer_step(
        self, state: LocalUpdateState, block_gradient: Array, samples: int, lr: float, ranks: int
    ) -> None:
        body(state.start).momentum_step(
            state.start,
            state.momentum,
            block_gradient,
            self.outer_learning_rate,
            self.outer_momentum,
            1.0,
            True,
        )
