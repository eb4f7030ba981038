"""Recognize rank failures, and reconfigure the communicator after them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import RanksLost
from ..job_environment import fault_tolerant
from .abort import rank_failure_errors

if TYPE_CHECKING:
    from ..communicator import Communicator


Result = TypeVar("Result")

MOST_FRUITLESS = 3
"""Most reconfigurations in a row without a missing rank; more of them have another cause."""


class RanksChanged(RanksLost):
    """The ranks were reconfigured meanwhile: start again with the present ranks."""


class RankFailed(RuntimeError):
    """Another rank of this world of threads has ended with an error."""


def is_rank_failure(error: BaseException | None) -> bool:
    """Return True if an error, ours or MPI's, reports failed ranks. Local."""
    if isinstance(error, RanksLost):
        return True
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(error, mpi.Exception):
        return False
    kinds = rank_failure_errors(mpi)
    if fault_tolerant():
        # For several requests at once MPI reports only that some have failed. Open MPI's
        # collectives sometimes report an unspecific error: "known error not in list".
        kinds |= {mpi.ERR_IN_STATUS, mpi.ERR_PENDING, mpi.ERR_OTHER, mpi.ERR_INTERN}
    return error.Get_error_class() in kinds


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
    return is_rank_failure(error) and comm.fault_tolerant and comm.fruitless <= MOST_FRUITLESS


def reconfigure_ranks(comm: Communicator) -> None:
    """Continue with the remaining and joining ranks. Collective."""

    def reconfigure() -> None:
        comm.revoke()
        comm.reconfigure(allow_join=True)

    retry(comm, lambda: None, reconfigure, failed=True)
