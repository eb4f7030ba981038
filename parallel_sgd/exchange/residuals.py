"""What messages have lost and later ones send: see `stages`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..state import across

Array = Any  #: a NumPy or CuPy array


@dataclass
class Residuals:
    """What the messages of one rank have lost so far: training state, kept in checkpoints.

    Attributes:
        own: float32 [n], from this rank's messages to the owners of stripes.
        total: float32 [this rank's stripe] by the bucket's number, from its messages as an owner.
    """

    own: Array = across("sum")
    total: dict[str, Array] = across("stripe")
