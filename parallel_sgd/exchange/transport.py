"""What every transport of an exchange can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .layout import Topology
from .reduction import Reduction
from .residuals import Residuals

Array = Any  #: a NumPy or CuPy array
IsReady = Callable[[int], bool]  #: whether the values of a bucket, by its number, are there
ReductionsOver = Callable[[Topology], list[Reduction]]  #: of every bucket, with their buffers


class Transport(Protocol):
    """Decides when the steps of a `Reduction` are done, and how their messages travel.

    A class of them is made of a `ReductionsOver`, the topology, and the ranks, on whose
    communicator nothing else may send messages meanwhile. Its name is in `exchange.TRANSPORTS`.

    Attributes:
        reductions: of every bucket, in the order in which their values are ready.
    """

    reductions: list[Reduction]

    def sum(self, vector: Array, residuals: Residuals | None, is_ready: IsReady | None) -> int:
        """Replace `vector` by its sum over all ranks, the same bits on all.

        Args:
            vector: [n], finite.
            residuals: updated; None where nothing is lost.
            is_ready: asked for one bucket after the other, until it is so. None: all are.
        Returns:
            The bytes that this rank has sent to others.

        Collective.
        """
        ...
