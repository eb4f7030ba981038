"""How our own programs run on a rank: whatever ends one other than success ends the job on all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..errors import Preempted, SharedError, UserError
from ..starting import started
from .liveness.abort import (
    end_job,
    has_other_ranks,
    mpi_is_finalized,
    print_error,
    report,
    running_mpi,
)
from .liveness.rank_status import PREEMPTED, report_end
from .timeouts import LONGEST_S


@contextlib.contextmanager
def abort_on_error() -> Iterator[None]:
    """Run an entry point: whatever ends it other than success ends the job on every rank.

    What the user can mend (a UserError, a full disk) prints one line, any other exception its
    traceback, each line led by ``[rank k]``, and once for all ranks that say the same where the
    launcher prints it; `sys.exit` with a code other than 0 keeps its code.
    `Preempted`, which all ranks raise, ends each of them as its program's end would; a program that
    catches it, and goes on, has not left.
    The rank then waits until the others have printed a SharedError, or else `abort.GRACE_S`, in
    case they have the same error, and calls MPI_Abort. With one rank there is no one to stop: it
    prints the same and exits.

    Local. Example::

        with abort_on_error():
            main()
    """
    started()
    try:
        yield
    except SystemExit as error:
        code = _exit_code(error)
        if isinstance(error, Preempted):
            report_end(PREEMPTED)
        if code == 0 or isinstance(error, Preempted):
            _join_others()
            raise
        if isinstance(error.code, str):
            print_error(error.code)
        elif has_other_ranks():
            print_error(f"parallel-sgd: error: sys.exit({code}) on this rank ends the job on all")
        end_job(code)
    except BaseException as error:
        end_job(report(error), shared=isinstance(error, SharedError))
    else:
        _join_others()


def _exit_code(error: SystemExit) -> int:
    """The exit code that `python` would end with, in 0 … 255."""
    if error.code is None:
        return 0
    if not isinstance(error.code, int):
        return 1
    return error.code & 0xFF or int(error.code != 0)


def _join_others() -> None:
    """This rank ends well. If MPI is not up, the others may wait for it there: start MPI, so that
    they find out as from any rank that has left (`departures`)."""
    if not has_other_ranks() or running_mpi() is not None or mpi_is_finalized():
        return
    with contextlib.suppress(ImportError, RuntimeError, UserError):  # there is no MPI to wait in
        from .mpi.communicator import mpi_world

        mpi_world(timeout_s=LONGEST_S, cuda_aware=False)
