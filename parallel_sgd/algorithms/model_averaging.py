"""Model averaging: every block ends with the mean of the ranks' models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .algorithm import Array
from .local_updates import LocalUpdateState, LocalUpdatesWithInnerState


@dataclass(frozen=True, kw_only=True)
class ModelAveragingSGD(LocalUpdatesWithInnerState):
    """Φ = Φ - G, which is the mean of the models weighted by samples: sum_k n_k x_k / N.

    The options are those of `LocalUpdates`; a block is 40,000 samples of each rank if none is
    given. A constant block gradient G moves the model by G a block.

    Source: McDonald, Hall, Mann, "Distributed Training Strategies for the Structured Perceptron",
    NAACL 2010; Microsoft CNTK's ModelAveragingSGD, whose mean does not count samples.
    """

    default_period: ClassVar[dict[str, int]] = {"sync_period": 40_000}

    @property
    def has_momentum(self) -> bool:
        return False

    def outer_step(
        self, state: LocalUpdateState, block_gradient: Array, samples: int, lr: float, ranks: int
    ) -> None:
        state.start -= block_gradient
