"""Recognize failures of ranks, and retry after failures: the one loop of all recoveries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import RanksChanged, RanksLost
from ..liveness.abort import rank_failure_errors

if TYPE_CHECKING:
    from ..communicator import Communicator

Result = TypeVar("Result")

MOST_FRUITLESS = 3
"""Reconfigurations in a row in which no rank was missing. After more, something else is wrong."""


def retry(
    comm: Communicator,
    attempt: Callable[[], Result],
    recover: Callable[[], object],
    *,
    failed: bool = False,
) -> Result:
    """Call `attempt` until it returns. After each rank failure call `recover` first.

    Args:
        comm: counts reconfigurations without a missing rank (`fruitless`).
        attempt: work of all ranks.
        recover: called again after a rank failure of its own.
        failed: a rank has failed already: start with `recover`.
    Returns:
        The result of `attempt`.
    Raises:
        Exception: any error except a rank failure; or a rank failure after more than
            `MOST_FRUITLESS` fruitless reconfigurations in a row.

    Collective among the remaining ranks.
    """
    while True:
        try:
            if failed:
                recover()
            failed = False
            return attempt()
        except Exception as error:
            if not can_recover(comm, error):
                raise
            failed = not isinstance(error, RanksChanged)


def can_recover(comm: Communicator, error: BaseException) -> bool:
    """Return True if the remaining ranks can continue after an error. Local."""
    return comm.fault_tolerant and reports_failure(error) and comm.fruitless <= MOST_FRUITLESS


def reports_failure(error: BaseException | None) -> bool:
    """Return True if an error of fault-tolerant ranks reports failed ranks. Local.

    For several requests at once MPI reports only that some have failed. Open MPI's collectives
    sometimes report an unspecific error: "known error not in list".
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(error, mpi.Exception):
        return isinstance(error, RanksLost)
    unspecific = {mpi.ERR_IN_STATUS, mpi.ERR_PENDING, mpi.ERR_OTHER, mpi.ERR_INTERN}
    return error.Get_error_class() in rank_failure_errors(mpi) | unspecific


def raise_rank_failure(error: BaseException | None, place: str) -> None:
    """Raise `RanksLost` if an error of fault-tolerant ranks reports failed ranks. Local."""
    if reports_failure(error):
        raise RanksLost(f"a rank has failed: found in {place}") from error


class RankFailures(ContextDecorator):
    """Context manager and decorator: raises `RanksLost` for MPI's errors about failed ranks. Local.

    Args:
        place: name of the work inside, for the message.
    """

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if error is not None:
            raise_rank_failure(error, self._place)


def reconfigure_ranks(comm: Communicator) -> None:
    """Continue with the remaining and joining ranks. Collective."""

    def reconfigure() -> None:
        comm.revoke()
        comm.reconfigure(allow_join=True)

    retry(comm, lambda: None, reconfigure, failed=True)
