"""Handle the failure of a rank: end the job, or continue with the remaining ranks (`--survive`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..communication.job_environment import SURVIVE
from ..errors import UserError
from .hosts import OPEN_MPI

if TYPE_CHECKING:
    from .mpiexec import Mpiexec
    from .options import Request
    from .supervisor import Supervisor

#: Open MPI's options for fault tolerance, by a text that shows that the user has set the option.
#: Some components of its collectives give wrong sums after a failure, and are excluded. Excluding a
#: component that this Open MPI lacks does no harm.
_OPTIONS = {
    "with-ft": ("--with-ft", "ulfm"),
    "mca coll ": ("--mca", "coll", "^hcoll,portals4,han,cuda"),
}


class FailurePolicy:
    """Policy for a failed rank. This class is the default: the failure ends the job."""

    #: Variables for the ranks.
    variables: Mapping[str, str] = {}

    def mpiexec_options(self, mpiexec: Mpiexec, given: str) -> list[str]:
        """Return the options for mpiexec that the user has not given.

        Raises:
            UserError: this mpiexec does not support the policy.
        """
        return []

    def recovering_ranks(self, request: Request) -> int | None:
        """Return the number of ranks that recover, the first ones of the job. None: no rank."""
        return None

    def expects(self, code: int) -> bool:
        """Return True if mpiexec may end a complete job with this exit code."""
        return code == 0

    def error_line(self, supervisor: Supervisor) -> str | None:
        """Return an error line about the rank that has ended the job, or None."""
        return supervisor.silent_exit_line()

    def loss_line(self, why: str) -> str | None:
        """Return an error line about a job lost after its start, or None if not needed."""
        return None


class ContinueJob(FailurePolicy):
    """The remaining ranks continue after a failure. Needs Open MPI 5."""

    variables: Mapping[str, str] = {SURVIVE: "1"}

    def mpiexec_options(self, mpiexec: Mpiexec, given: str) -> list[str]:
        major = (mpiexec.version or "").partition(".")[0]
        if mpiexec.vendor != OPEN_MPI or (major.isdecimal() and int(major) < 5):
            mpi = f"{mpiexec.vendor or 'of an unknown vendor'} {mpiexec.version or ''}".strip()
            raise UserError(
                f"--survive needs Open MPI 5 or later: {mpiexec.path} is {mpi}, which ends the job "
                "when a rank fails (--restarts N restarts the job)"
            )
        return [word for shows, words in _OPTIONS.items() if shows not in given for word in words]

    def recovering_ranks(self, request: Request) -> int | None:
        assert request.ranks is not None
        return request.ranks - (request.spares or 0)

    def expects(self, code: int) -> bool:
        return True

    def error_line(self, supervisor: Supervisor) -> str | None:
        return None

    def loss_line(self, why: str) -> str | None:
        return f"not complete: {why}"


def failure_policy(request: Request) -> FailurePolicy:
    """Return the policy requested by the user."""
    return ContinueJob() if request.survive else FailurePolicy()
