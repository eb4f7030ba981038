"""SlowMo: slow momentum over block gradients in units of the local learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..kernels import body
from ..validation import number, settle
from .algorithm import Array
from .local_updates import LocalUpdateState, LocalUpdatesWithInnerState

SMALLEST_LR = 1e-30
"""Below it G / lr could overflow float32: the limit of 0 is taken."""


@dataclass(frozen=True, kw_only=True)
class SlowMo(LocalUpdatesWithInnerState):
    """u = slow_momentum * u + G / lr;  Φ = Φ - slow_learning_rate * lr * u, with lr the local
    optimizer's learning rate in the block (in its last step, where it changes within).

    Args:
        slow_momentum: in [0, 1); the paper's β.
        slow_learning_rate: the paper's α.

    While lr is constant this is classical block momentum; when lr falls, what the momentum
    remembers falls with it. At lr = 0 the limit holds: Φ moves by slow_learning_rate * G, and u
    remembers nothing of this block.

    The other options are those of `LocalUpdates`; a block is 48 minibatches if none is given, as in
    the paper's ImageNet runs. A constant block gradient G moves the model by
    slow_learning_rate / (1 - slow_momentum) * G a block.

    Source: Wang, Tantia, Ballas, Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD
    with Slow Momentum", ICLR 2020, algorithm 1.
    """

    default_period: ClassVar[dict[str, int]] = {"sync_steps": 48}

    slow_momentum: float = 0.5
    slow_learning_rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(
            self,
            slow_momentum=number("slow_momentum", self.slow_momentum, 0, below=1),
            slow_learning_rate=number("slow_learning_rate", self.slow_learning_rate, 0),
        )

    def outer_step(
        self, state: LocalUpdateState, block_gradient: Array, samples: int, lr: float, ranks: int
    ) -> None:
        if lr < SMALLEST_LR:
            assert state.momentum is not None
            block_gradient *= self.slow_learning_rate
            state.start -= block_gradient
            state.momentum *= self.slow_momentum
            return
        body(state.start).momentum_step(
            state.start,
            state.momentum,
            block_gradient,
            self.slow_learning_rate * lr,
            self.slow_momentum,
            1 / lr,
            False,
        )
