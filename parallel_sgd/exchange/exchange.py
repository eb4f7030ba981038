"""What an algorithm knows of an exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..state import across

Array = Any  #: a NumPy or CuPy array


@dataclass
class Residuals:
    """What the messages of one rank have lost so far: training state, kept in checkpoints.

    Attributes:
        own: float32 [n], from this rank's messages to the owners of stripes.
        total: float32 [this rank's stripe], from its messages as an owner.
    """

    own: Array = across("sum")
    total: Array = across("stripe")


class Exchange(Protocol):
    """Sums vectors of one layout over all ranks."""

    bytes_sent: int
    """By this rank to others, over all exchanges so far."""

    def sum(self, vector: Array, residuals: Residuals | None) -> None:
        """Replace `vector` by its sum over all ranks, the same bits on all. Collective.

        Args:
            vector: [n], finite.
            residuals: updated; None where the exchange loses nothing.
        """
