"""Errors that report failed ranks, and their recognition."""

from __future__ import annotations

import sys
from typing import Any

from ...errors import RanksLost
from ..job_environment import fault_tolerant
from .abort import rank_failure_errors


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
