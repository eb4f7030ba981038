"""An error on one rank ends the whole job, at once and with a non-zero exit code.

Left alone, a rank that fails waits in MPI_Finalize for the others, which wait for it in their next
collective: the job hangs, on Open MPI and on MPICH. Our own programs run inside `abort_on_error`
(`entry_point`); a plain `mpiexec python train.py` is covered by `install_excepthook`: from
`import parallel_sgd` on where the launcher is known, else from `Communicator.world()` on. Nothing
here imports MPI: it works before MPI is up, after it is down, and without it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from ...errors import RanksLost, SharedError, SharedLoss, UserError, WaitedInVain
from ...validation import line_of
from ..job_environment import launched_rank, launched_size, srun_step
from ..stderr import write_stderr
from .heartbeat import own
from .rank_process import claim, hydras_socket, is_rank
from .rank_status import FAILED, LOST, report_end, report_error

#: Before it ends the job a rank waits so long: others with the same error can print it too, and
#: mpiexec reads what was printed; MPICH's drops what is still on its way when a rank aborts.
GRACE_S = 0.4

#: How long a rank waits at most for the others to print an error that all of them share.
_PRINT_S = 5.0

#: A process that has closed its connections as it ends is gone after so many seconds.
_DIES_S = 0.2

#: How long Hydra may take to end a job that asks for it over its own wire.
_HYDRA_S = 2.0

#: How long Slurm's controller may take to be asked, and then to end a step.
_SLURM_S = 10.0

INTERRUPTED = 128 + signal.SIGINT

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_COMMAND_LINE = _PACKAGE + "command_line" + os.sep

#: Leading frames of a traceback that only lead to the user's script, and would hide it.
SCAFFOLD = {
    str(Path(__file__).parents[1] / "entry_point.py"),
    contextlib.__file__,
    "<frozen runpy>",
    _COMMAND_LINE + "rank.py",
}


def install_excepthook() -> None:
    """Make an uncaught exception on this rank end the job, also in a script started by `python`.

    Prints like `abort_on_error`. An exception at an interactive prompt, and one in a process that
    is alone or was started by a rank, goes to the hook that was there before. `sys.exit(3)` on one
    rank does not reach any hook: scripts that do so are for `parallel-sgd run` or `abort_on_error`.

    Local. Calling it again changes nothing.
    """
    if getattr(sys.excepthook, "ends_the_job", False):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if hasattr(sys, "ps1") or sys.flags.interactive or not has_other_ranks():
            previous(kind, error, frames)
            return
        end_job(report(error), shared=isinstance(error, SharedError))

    hook.ends_the_job = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def install_excepthook_if_launched() -> None:
    """`install_excepthook` where a launcher says that it started several ranks; else nothing. The
    first process of a launcher's that calls this is the rank: see `rank_process`.

    For `import parallel_sgd`, since a rank may fail before it reaches `Communicator.world()`, in
    which the others then wait. Local. Cost: a few look-ups in the environment.
    """
    claim()
    if is_rank() and (launched_size() or 1) > 1:
        install_excepthook()


def end_job(code: int, *, shared: bool = False) -> NoReturn:
    """End every rank of this job, with this exit code (not 0). Flushes first, and waits `GRACE_S`.

    Args:
        shared: all ranks are about to call this: none ends the job before the last one has.

    Where MPI is up: MPI_Abort. Where it is not, the rank's own exit is enough for Open MPI's
    mpiexec, while MPICH's and srun go on waiting for the others, and have to be told.

    Local.
    """
    report_end(FAILED)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    try:
        sys.stdout.flush()
    except OSError:
        discard_stdout()
    except (ValueError, AttributeError):  # it is closed, or there is none
        pass
    if has_other_ranks():
        mpi = running_mpi()
        if mpi is not None and shared:
            _wait_for_all(mpi)
        time.sleep(GRACE_S)
        if mpi is not None and mpi.COMM_WORLD.Get_size() > 1:
            mpi.COMM_WORLD.Abort(code)
        if not mpi_is_finalized():
            _tell_hydra(code)
            _tell_slurm()
    raise SystemExit(code)


def end_at_exit(errors: Sequence[BaseException]) -> NoReturn:
    """End every rank of this job for errors that come to light as the program is about to end well.

    For an exit handler, where no exception changes the exit code any more. Local.
    """
    for error in errors:
        report(error)
    with contextlib.suppress(SystemExit):
        end_job(1, shared=all(isinstance(error, SharedError) for error in errors))
    os._exit(1)


def rank_label() -> str:
    """How this rank's messages begin: ``[rank 2] ``, or nothing where there are no ranks."""
    mpi = running_mpi()
    if mpi is not None and mpi.COMM_WORLD.Get_size() > 1:
        return f"[rank {mpi.COMM_WORLD.Get_rank()}] "
    rank = launched_rank()
    return "" if rank is None else f"[rank {rank}] "


def _wait_for_all(mpi: Any) -> None:
    """Wait until every rank is here, `_PRINT_S` at most; not at all where one has died."""
    deadline = time.monotonic() + _PRINT_S
    with contextlib.suppress(mpi.Exception):
        barrier = mpi.COMM_WORLD.Ibarrier()
        while not barrier.Test() and time.monotonic() < deadline:
            time.sleep(0.01)


def report(error: BaseException) -> int:
    """Print what the user needs to know of an error; returns the exit code that goes with it."""
    dead = _failed_rank(error)
    if isinstance(error, WaitedInVain | SharedLoss | RanksLost) or dead is not None:
        report_end(LOST)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in SCAFFOLD:
        frames = frames.tb_next
    line, shared = user_message(error), isinstance(error, SharedError)
    if isinstance(error, KeyboardInterrupt):
        places = traceback.extract_tb(frames)[-1:]
        where = [f" in {place.name}, {place.filename}:{place.lineno}" for place in places]
        print_error("".join(["interrupted", *where]))
        return INTERRUPTED
    if line is not None:
        print_error(f"{line}{user_location(traceback.extract_tb(frames))}", shared=shared)
    elif dead is not None:
        print_error(
            f"parallel-sgd: error: {dead} has died, and the others cannot go on with what needs "
            "all of them"
        )
    else:
        print_error("".join(traceback.format_exception(type(error), error, frames)))
    return 1


def user_message(error: BaseException) -> str | None:
    """The one line that is all a user needs to know of an error; None where that is a traceback.

    Local.
    """
    if isinstance(error, UserError):
        return f"parallel-sgd: error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return "parallel-sgd: interrupted"
    if isinstance(error, MemoryError):
        return f"parallel-sgd: error: there is not enough memory: {line_of(error)}"
    if isinstance(error, BrokenPipeError) and _nobody_reads():  # as in `train … | head -1`
        return "parallel-sgd: error: nobody reads any more what is printed"
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return f"parallel-sgd: error: what was to be written could not be: {line_of(error)}"
    return None


def discard_stdout() -> None:
    """Nothing more is to be written there as Python exits. Local."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _nobody_reads() -> bool:
    """Whether stdout is a pipe whose reader has left."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        ends = select.poll()
        ends.register(sys.stdout.fileno(), 0)
        return bool(ends.poll(0))
    return False


def _failed_rank(error: BaseException) -> str | None:
    """The rank whose death is the cause of an error of MPI's, in words; None: that is not known.

    Some MPIs say so (ULFM). Of others a rank sees how a message fails (MPICH: "process_vm_readv
    failed"), and that the process of another rank of its host is gone.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(error, mpi.Exception):
        return None
    says_so = error.Get_error_class() in rank_failure_errors(mpi)
    until = time.monotonic() + _DIES_S
    while not (gone := own.failed_neighbours()) and not says_so and time.monotonic() < until:
        time.sleep(0.01)
    if gone:
        return f"rank {gone[0].rank} (pid {gone[0].process})"
    return "a rank" if says_so else None


def rank_failure_errors(mpi: Any) -> set[int]:
    """The error classes of MPIs whose ranks survive the death of others (ULFM)."""
    names = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
    return {getattr(mpi, name) for name in names if hasattr(mpi, name)}


def print_error(text: str, *, shared: bool = False) -> None:
    """Have the launcher print the lines of an error, once for all ranks that say the same; print
    them here where it does not.

    Args:
        shared: whether all ranks raise it, because they have agreed to.
    """
    if not report_error(text, shared=shared):
        print_labelled(text)


def print_labelled(text: str) -> None:
    """Write lines to stderr in one piece, each led by the rank: ranks share one terminal."""
    label = rank_label()
    write_stderr(*(f"{label}{line}" for line in text.splitlines()))


def user_location(stack: traceback.StackSummary) -> str:
    """Where the user's own code stands in a stack, or an error of ours arose: `` (train.py:12)``,
    or nothing.

    Nothing where our own command line has read the arguments: no line of the user's is at fault.
    """
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    not_users = (_PACKAGE, "<", *(sysconfig.get_path(kind) + os.sep for kind in kinds))
    for frame in reversed(stack):
        if frame.filename.startswith(_COMMAND_LINE):
            return ""
        if not frame.filename.startswith(not_users):
            return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""


def has_other_ranks() -> bool:
    """Whether other ranks may be waiting for this process, which is a rank itself."""
    if not is_rank():
        return False
    mpi = running_mpi()
    if mpi is not None and mpi.COMM_WORLD.Get_size() > 1:
        return True
    return (launched_size() or 1) > 1


def running_mpi() -> Any:
    """The module mpi4py.MPI if it is imported, initialized and not finalized; else None."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    ready = mpi is not None and hasattr(mpi, "COMM_WORLD")
    return mpi if ready and mpi.Is_initialized() and not mpi.Is_finalized() else None


def mpi_is_finalized() -> bool:
    """Whether MPI was up and is finalized: no rank waits for another any more."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi is not None and hasattr(mpi, "COMM_WORLD") and bool(mpi.Is_finalized())


def _tell_hydra(code: int) -> None:
    """End a job of MPICH's mpiexec (Hydra) from a rank in which MPI is not up.

    Hydra takes the exit code of a rank that never called MPI_Init for a normal end, and lets the
    others wait for it in MPI_Init for ever. It listens on the socket over which the library would
    talk to it (PMI-1); should it not heed that, it does heed a rank that dies of a signal.
    """
    descriptor = hydras_socket()
    if descriptor is None:
        return
    with contextlib.suppress(OSError):
        os.write(descriptor, f"cmd=abort exitcode={code}\n".encode())
    time.sleep(_HYDRA_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _tell_slurm() -> None:
    """End a step of srun from a rank in which MPI is not up.

    Unless it was called with -K, srun lets the others go on, which wait in MPI_Init for ever.
    """
    step = srun_step()
    if step is None:
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # no scancel on this node
        asked = subprocess.run(
            ["scancel", step],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SLURM_S,
        )
        if asked.returncode == 0:
            time.sleep(_SLURM_S)  # this rank is killed with the others
