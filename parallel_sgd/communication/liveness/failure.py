"""Errors that say that other ranks have died or failed; and how those that are left meet again."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ...errors import RanksLost
from ..job_environment import fault_tolerant
from .abort import rank_failure_errors

if TYPE_CHECKING:
    from ..communicator import Communicator


MOST_FRUITLESS = 3
"""Times that the ranks regroup, and nobody was missing, in a row: then something else is wrong."""


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


def reconfigure_ranks(comm: Communicator) -> None:
    """Go on with the ranks that are left, and those that join; again, where more die meanwhile.
    Collective."""
    fruitless = 0
    while True:
        before = comm.world_ranks
        try:
            comm.revoke()
            comm.reconfigure(allow_join=True)
            return
        except Exception as error:
            fruitless = fruitless + 1 if comm.world_ranks == before else 0
            if not is_rank_failure(error) or fruitless > MOST_FRUITLESS:
                raise
