"""What messages have lost, and later ones send: the error feedback of an exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..kernels import empty_like
from ..state import across, workspace

Array = Any  #: a NumPy or CuPy array


@dataclass
class Residuals:
    """What the messages of one rank have lost so far: training state, kept in checkpoints.

    Attributes:
        worker_error: float32 [n], of this rank's messages to the owners of stripes.
        owner_error: float32 [this rank's stripe] by the bucket's number, of its messages as an
            owner. (With parameter servers it is called the server's.)
        has_non_owned: whether the worker error may also be of values that another rank of the host
            adds up and sends: after it has come from a checkpoint of other ranks or hosts.
    """

    worker_error: Array = across("sum")
    owner_error: dict[str, Array] = across("stripe")
    has_non_owned: bool = workspace(default=False)

    @classmethod
    def zeros(cls, like: Array, stripes: Mapping[str, int]) -> Residuals:
        """Those with which training starts.

        Args:
            like: the vector [n] that is to be exchanged.
            stripes: how many values this rank owns, by bucket.

        Local.
        """
        owned = {name: empty_like(like, size) for name, size in stripes.items()}
        residuals = cls(empty_like(like, like.size), owned)
        residuals.reset()
        return residuals

    @property
    def vectors(self) -> list[Array]:
        """All of them, in one order."""
        return [self.worker_error, *self.owner_error.values()]

    def reset(self) -> None:
        """Make them zero: what was lost is never sent. Local."""
        for error in self.vectors:
            error.fill(0)

    def give_non_owned(self, values: slice, vector: Array) -> None:
        """Before another rank adds up some values: give it their worker error, too.

        Args:
            values: of the vector [n], changed there.

        Nothing where there is none (`has_non_owned`). Local.
        """
        if self.has_non_owned:
            vector[values] += self.worker_error[values]
            self.worker_error[values] = 0
