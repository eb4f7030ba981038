"""Entry points of our own programs: any end of a rank except success ends the job on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..errors import Preempted, SharedError, UserError
from ..starting import started
from .job_environment import torch_ranks
from .liveness.abort import (
    end_job,
    has_other_ranks,
    mpi_is_finalized,
    print_error,
    report,
    running_mpi,
)
from .liveness.rank_process import world_without_mpi
from .liveness.rank_status import Status, report_status
from .timeouts import LONGEST_S


@contextlib.contextmanager
def abort_on_error() -> Iterator[None]:
    """Run an entry point. Any end except success ends the job on every rank.

    An error for the user to fix (a UserError, a full disk) prints a single line, any other
    exception its traceback. Each line begins with ``[rank k]``. If the launcher prints errors,
    equal errors of several ranks are printed once. `sys.exit` with a code except 0 keeps its code.
    `Preempted`, raised on all ranks, ends each rank like the end of its program; a program may also
    catch it and continue.
    The rank then waits until all ranks have printed a SharedError, or otherwise `abort.GRACE_S` in
    case several ranks have the same error, and calls MPI_Abort. A single rank prints the same and
    exits.

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
            report_status(Status.PREEMPTED)
        if code == 0 or isinstance(error, Preempted):
            _join_others()
            raise
        if isinstance(error.code, str):
            print_error(error.code)
        elif has_other_ranks():
            print_error(
                f"parallel-sgd: error: sys.exit({code}) on this rank ends the job on all ranks"
            )
        end_job(code)
    except BaseException as error:
        end_job(report(error), shared=isinstance(error, SharedError))
    else:
        _join_others()


def _exit_code(error: SystemExit) -> int:
    """Return the exit code of `python` for this SystemExit, in 0 … 255."""
    if error.code is None:
        return 0
    if not isinstance(error.code, int):
        return 1
    return error.code & 0xFF or int(error.code != 0)


def _join_others() -> None:
    """Start MPI as this rank ends successfully, if MPI is not initialized.

    The remaining ranks may be waiting in MPI_Init. The finish protocol then reports this rank's
    end.
    """
    if not has_other_ranks() or running_mpi() is not None or mpi_is_finalized():
        return
    if world_without_mpi() is not None or torch_ranks() is not None:  # ranks without MPI
        return
    with contextlib.suppress(ImportError, RuntimeError, UserError):  # no MPI: no rank waits in it
        from .mpi.communicator import mpi_world

        mpi_world(timeout_s=LONGEST_S, cuda_aware=False)
