"""Errors that say that other ranks have died or failed; and how those that are left meet again."""

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
"""Reconfigurations in a row in which no rank was missing. After more, something else is wrong."""


class RanksChanged(RanksLost):
    """The ranks were reconfigured meanwhile: begin again with the present ones."""


class RankFailed(RuntimeError):
    """Another rank of this world of threads has ended with an error."""


def is_rank_failure(error: BaseException | None) -> bool:
    """Whether an error says that ranks have died, also one of MPI's own. Local."""
    if isinstance(error, RanksLost):
        return True
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(error, mpi.Exception):
        return False
    kinds = rank_failure_errors(mpi)
    if fault_tolerant():
        # Of several requests at once MPI says only that some have failed, and Open MPI's
        # collectives at times that something has: "known error not in list".
        kinds |= {mpi.ERR_IN_STATUS, mpi.ERR_PENDING, mpi.ERR_OTHER, mpi.ERR_INTERN}
    return error.Get_error_class() in kinds


def retry(
    comm: Communicator,
    attempt: Callable[[], Result],
    recover: Callable[[], object],
    *,
    failed: bool = False,
) -> Result:
    """Call `attempt` until it returns, and after each failure of ranks call `recover` first.

    Args:
        comm: counts reconfigurations in which no rank was missing (`fruitless`).
        recover: may fail likewise, and is then called again.
        failed: ranks have failed already: begin with `recover`.
    Raises:
        Exception: any other error; or a failure of ranks after more than `MOST_FRUITLESS`
            fruitless reconfigurations in a row.

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
    """Return whether the remaining ranks can continue after an error. Local."""
    return is_rank_failure(error) and comm.fault_tolerant and comm.fruitless <= MOST_FRUITLESS


def reconfigure_ranks(comm: Communicator) -> None:
    """Continue with the remaining ranks and those that join. Collective."""

    def reconfigure() -> None:
        comm.revoke()
        comm.reconfigure(allow_join=True)

    retry(comm, lambda: None, reconfigure, failed=True)
