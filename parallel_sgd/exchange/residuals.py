"""The error feedback of an exchange: errors of earlier messages, added to later messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..kernels import empty_like
from ..state import across, workspace

Array = Any  #: a NumPy or CuPy array


@dataclass
class Residuals:
    """The compression errors of one rank's messages: training state, kept in checkpoints.

    Attributes:
        worker_error: float32 [n], of this rank's messages to the owners of stripes.
        owner_error: float32 [this rank's stripe] by bucket number, of this rank's messages as an
            owner. (With parameter servers: the server's error.)
        has_non_owned: True if `worker_error` may include values led by another rank of the host.
            This happens after loading a checkpoint of other ranks or hosts.
    """

    worker_error: Array = across("sum")
    owner_error: dict[str, Array] = across("stripe")
    has_non_owned: bool = workspace(default=False)

    @classmethod
    def zeros(cls, like: Array, stripes: Mapping[str, int]) -> Residuals:
        """Create zero residuals to start training with.

        Args:
            like: the vector [n] to be exchanged.
            stripes: the number of values that this rank owns, by bucket.

        Local.
        """
        owned = {name: empty_like(like, size) for name, size in stripes.items()}
        residuals = cls(empty_like(like, like.size), owned)
        residuals.reset()
        return residuals

    @property
    def vectors(self) -> list[Array]:
        """All residuals, in a fixed order."""
        return [self.worker_error, *self.owner_error.values()]

    def reset(self) -> None:
        """Set all residuals to zero and so discard the errors. Local."""
        for error in self.vectors:
            error.fill(0)

    def decay(self, factor: float, values: slice, buckets: Iterable[str]) -> None:
        """Multiply residuals by a factor from 0 to 1: the rest of each error is forgotten. Local.

        Args:
            values: the slice of the vector.
            buckets: its buckets.
        """
        if factor != 1:
            for error in (self.worker_error[values], *map(self.owner_error.get, buckets)):
                error *= factor

    def give_owned(self, owned: Mapping[str, slice]) -> None:
        """Add the errors as an owner to those of this rank's messages: the stripes are to be cut
        anew. Local.

        Args:
            owned: this rank's stripe in the vector, by bucket.
        """
        for name, values in owned.items():
            self.worker_error[values] += self.owner_error[name]

    def cut(self, owned: Mapping[str, slice]) -> None:
        """Begin without errors as an owner of these stripes, after `give_owned`. Local."""
        for name, values in owned.items():
            self.owner_error[name] = empty_like(self.worker_error, values.stop - values.start)
            self.owner_error[name].fill(0)

    def give_non_owned(self, values: slice, vector: Array) -> None:
        """Add the worker error of some values to `vector`, before another rank leads these values.

        Args:
            values: the slice of the vector.
            vector: [n], changed there.

        Does nothing unless `has_non_owned`. Local.
        """
        if self.has_non_owned:
            vector[values] += self.worker_error[values]
            self.worker_error[values] = 0
