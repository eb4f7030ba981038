"""The interface of the transports of an exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .layout import Topology
from .reduction import Reduction
from .residuals import Residuals

Array = Any  #: a NumPy or CuPy array
IsReady = Callable[[int], bool]  #: bucket number -> True once the bucket's values are complete
ReductionsOver = Callable[[Topology], list[Reduction]]  #: makes the reductions of all buckets


class Transport(Protocol):
    """Schedules the steps of a `Reduction` and carries its messages.

    A transport class is constructed from a `ReductionsOver`, the topology and the ranks, and is
    listed by name in `exchange.TRANSPORTS`. During a sum, nothing else may use the ranks'
    communicator.

    Attributes:
        reductions: for each bucket, in the order in which the values become ready.
    """

    reductions: list[Reduction]

    def sum(self, vector: Array, residuals: Residuals | None, is_ready: IsReady | None) -> int:
        """Replace `vector` by its sum over all ranks, the same bits on all ranks.

        Args:
            vector: [n], finite.
            residuals: updated; None if nothing is lost.
            is_ready: polled bucket by bucket until True. None: all buckets are ready.
        Returns:
            The bytes sent by this rank.

        Collective.
        """
        ...
