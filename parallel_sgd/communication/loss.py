"""Whether an error says that ranks have died, where the others go on."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import RanksLost
from .abort import dead_rank_errors
from .launched import survives


def is_loss(error: BaseException | None) -> bool:
    """Whether an error says so, also one of MPI's own. Local."""
    if isinstance(error, RanksLost):
        return True
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(error, mpi.Exception):
        return False
    kinds = dead_rank_errors(mpi)
    if survives():
        # Of several requests at once MPI says only that some have failed, and Open MPI's
        # collectives at times that something has: "known error not in list".
        kinds |= {mpi.ERR_IN_STATUS, mpi.ERR_PENDING, mpi.ERR_OTHER, mpi.ERR_INTERN}
    return error.Get_error_class() in kinds
