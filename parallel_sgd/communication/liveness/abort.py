"""End the whole job, at once and with a non-zero exit code, after an error on any rank.

Otherwise the failed rank waits in MPI_Finalize for the remaining ranks, and these wait for the
failed rank in their next collective: the job hangs, on Open MPI and on MPICH. Our own programs run
inside `abort_on_error` (`entry_point`). A plain `mpiexec python train.py` is covered by
`install_excepthook`: from `import parallel_sgd` on if the launcher is known, else from
`Communicator.world()` on. This module does not import MPI: its functions work before MPI is
initialized, after MPI is finalized, and without MPI.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from ...errors import (
    PeerFailure,
    RanksLost,
    SharedError,
    SharedPeerFailure,
    UserError,
    is_users_file,
)
from ...validation import line_of
from ..job_environment import launched_rank, launched_size, srun_step
from ..stderr import write_stderr
from .heartbeat import own
from .rank_process import claim, hydras_socket, is_rank, world_without_mpi
from .rank_status import Status, report_error, report_status

#: Pause of a rank before it ends the job: other ranks with the same error can print it, and
#: mpiexec can read the output. MPICH's mpiexec drops output in flight when a rank aborts.
GRACE_S = 0.4

#: Longest wait for the other ranks to print an error shared by all ranks.
_PRINT_S = 5.0

#: Time for a process to exit after closing its connections.
_EXITS_S = 0.2

#: Time for Hydra to end a job after a request over PMI.
_HYDRA_S = 2.0

#: Time for Slurm's controller to accept a request, and again to end a step.
_SLURM_S = 10.0

INTERRUPTED = 128 + signal.SIGINT

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_COMMAND_LINE = _PACKAGE + "command_line" + os.sep

#: Files of the leading frames of a traceback, before the user's script; not printed.
SCAFFOLD = {
    str(Path(__file__).parents[1] / "entry_point.py"),
    contextlib.__file__,
    "<frozen runpy>",
    str(Path(_PACKAGE, "launcher", "rank.py")),
}


def install_excepthook() -> None:
    """Make an uncaught exception on this rank end the job, also in a script run by `python`.

    Prints like `abort_on_error`. The previous hook handles an exception at an interactive prompt,
    in a process without further ranks, or in a process started by a rank. `sys.exit(3)` on a single
    rank reaches no hook: run such scripts by `parallel-sgd run` or inside `abort_on_error`.

    Local. Calling it again changes nothing.
    """
    if getattr(sys.excepthook, "ends_the_job", False):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if hasattr(sys, "ps1") or sys.flags.interactive or not has_other_ranks():
            previous(kind, error, frames)
            return
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            # PyTorch's hook prints what this hook has written only after this hook's return.
            sys.stderr = sys.__stderr__
        end_job(report(error), shared=isinstance(error, SharedError))

    hook.ends_the_job = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def install_excepthook_if_launched() -> None:
    """Call `install_excepthook` if a launcher reports several ranks, else do nothing.

    The first process of a launcher to call this is the rank: see `rank_process`. For `import
    parallel_sgd`, since a rank may fail before `Communicator.world()`, while the remaining ranks
    wait in that call. Local. Cost: a few look-ups in the environment.
    """
    claim()
    if has_other_ranks():
        install_excepthook()


def end_job(code: int, *, shared: bool = False) -> NoReturn:
    """End every rank of this job with this exit code. Flushes output first, and waits `GRACE_S`.

    Args:
        code: exit code, not 0.
        shared: all ranks are about to call this: no rank ends the job before the last call.

    Without MPI (torchrun), this process exits at once. If MPI is initialized: MPI_Abort. Otherwise
    the rank's own exit is enough for Open MPI's mpiexec. MPICH's mpiexec and srun would keep
    waiting for the remaining ranks, so both are asked explicitly.

    Local.
    """
    report_status(Status.FAILED)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    try:
        sys.stdout.flush()
    except OSError:
        discard_stdout()
    except (ValueError, AttributeError):  # stdout is closed or missing
        pass
    if has_other_ranks():
        mpi = running_mpi()
        if mpi is not None and shared:
            _wait_for_all(mpi)
        time.sleep(GRACE_S)
        if mpi is not None and mpi.COMM_WORLD.Get_size() > 1:
            mpi.COMM_WORLD.Abort(code)
        if world_without_mpi() is not None:
            os._exit(code)  # the end of its connections ends the other ranks
        if not mpi_is_finalized():
            _tell_hydra(code)
            _tell_slurm()
    raise SystemExit(code)


def end_at_exit(errors: Sequence[BaseException]) -> NoReturn:
    """End every rank of this job for errors found as the program is about to end successfully.

    For an exit handler, where an exception no longer changes the exit code. Local.
    """
    for error in errors:
        report(error)
    with contextlib.suppress(SystemExit):
        end_job(1, shared=all(isinstance(error, SharedError) for error in errors))
    os._exit(1)


def rank_label() -> str:
    """Return the prefix of this rank's messages: ``[rank 2] ``, or empty without ranks."""
    mpi = running_mpi()
    if mpi is not None and mpi.COMM_WORLD.Get_size() > 1:
        return f"[rank {mpi.COMM_WORLD.Get_rank()}] "
    rank, _ = world_without_mpi() or (launched_rank(), None)
    return "" if rank is None else f"[rank {rank}] "


def _wait_for_all(mpi: Any) -> None:
    """Wait for every rank, up to `_PRINT_S`; return at once if a rank has failed."""
    deadline = time.monotonic() + _PRINT_S
    with contextlib.suppress(mpi.Exception):
        barrier = mpi.COMM_WORLD.Ibarrier()
        while not barrier.Test() and time.monotonic() < deadline:
            time.sleep(0.01)


def report(error: BaseException) -> int:
    """Print an error for the user, and return the exit code for it.

    The status follows the text: if this process is ended in between, the launcher names the rank
    that has failed first.
    """
    failed_rank = _failed_rank(error)
    code = _print(error, failed_rank)
    if isinstance(error, PeerFailure | SharedPeerFailure | RanksLost) or failed_rank is not None:
        report_status(Status.LOST)
    return code


def _print(error: BaseException, failed_rank: str | None) -> int:
    """Print an error, caused by this failed rank if not None, and return the exit code for it."""
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
    elif failed_rank is not None:
        print_error(
            f"parallel-sgd: error: {failed_rank} has failed, and the remaining ranks cannot "
            "continue"
        )
    else:
        print_error("".join(traceback.format_exception(type(error), error, frames)))
    return 1


def user_message(error: BaseException) -> str | None:
    """Return the one-line message for an error, or None if the error needs a traceback. Local."""
    if isinstance(error, UserError):
        return f"parallel-sgd: error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return "parallel-sgd: interrupted"
    if isinstance(error, MemoryError):
        return f"parallel-sgd: error: there is not enough memory: {line_of(error)}"
    if isinstance(error, BrokenPipeError) and _stdout_has_no_reader():  # as in `train … | head -1`
        return "parallel-sgd: error: the reader of the printed output has exited"
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return f"parallel-sgd: error: writing has failed: {line_of(error)}"
    return None


def discard_stdout() -> None:
    """Redirect stdout to the null device, so that Python's exit writes nothing more. Local."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stdout_has_no_reader() -> bool:
    """Return True if stdout is a pipe without a reader."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        ends = select.poll()
        ends.register(sys.stdout.fileno(), 0)
        return bool(ends.poll(0))
    return False


def _failed_rank(error: BaseException) -> str | None:
    """Return the failed rank that caused an MPI error, in words, or None if unknown.

    Some MPIs report a failed rank (ULFM). With any other MPI a message fails (MPICH:
    "process_vm_readv failed"), and the process of a rank of this host has exited.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(error, mpi.Exception):
        return None
    reported = error.Get_error_class() in rank_failure_errors(mpi)
    until = time.monotonic() + _EXITS_S
    while not (exited := own.failed_neighbours()) and not reported and time.monotonic() < until:
        time.sleep(0.01)
    if exited:
        return f"rank {exited[0].rank} (pid {exited[0].process})"
    return "a rank" if reported else None


def rank_failure_errors(mpi: Any) -> set[int]:
    """Return the error classes of rank failures, for MPIs with fault tolerance (ULFM)."""
    names = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
    return {getattr(mpi, name) for name in names if hasattr(mpi, name)}


def print_error(text: str, *, shared: bool = False) -> None:
    """Let the launcher print an error, once for all ranks with the same text; else print here.

    Args:
        text: lines of the error.
        shared: all ranks raise this error by agreement.
    """
    if not report_error(text, shared=shared):
        print_labelled(text)


def print_labelled(text: str) -> None:
    """Write lines to stderr in one piece, each with the rank label: ranks share one terminal."""
    label = rank_label()
    write_stderr(*(f"{label}{line}" for line in text.splitlines()))


def user_location(stack: traceback.StackSummary) -> str:
    """Return the position of the user's code in a stack as `` (train.py:12)``, or an empty string.

    The stack is of a thread, or of an error of ours. Empty if our command line was reading
    arguments: no line of the user's code is at fault.
    """
    for frame in reversed(stack):
        if frame.filename.startswith(_COMMAND_LINE):
            return ""
        if is_users_file(frame.filename):
            return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""


def has_other_ranks() -> bool:
    """Return True if this process is a rank, and further ranks may be waiting for it."""
    if not is_rank():
        return False
    mpi = running_mpi()
    if mpi is not None and mpi.COMM_WORLD.Get_size() > 1:
        return True
    _, size = world_without_mpi() or (0, launched_size() or 1)
    return size > 1


def running_mpi() -> Any:
    """Return the module mpi4py.MPI if imported, initialized and not finalized; else None."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    ready = mpi is not None and hasattr(mpi, "COMM_WORLD")
    return mpi if ready and mpi.Is_initialized() and not mpi.Is_finalized() else None


def mpi_is_finalized() -> bool:
    """Return True if MPI is finalized: no rank waits for any rank now."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi is not None and hasattr(mpi, "COMM_WORLD") and bool(mpi.Is_finalized())


def _tell_hydra(code: int) -> None:
    """End a job of MPICH's mpiexec (Hydra) from a rank without initialized MPI.

    Hydra treats the exit code of a rank before MPI_Init as a normal end, and lets the remaining
    ranks wait in MPI_Init for ever. Hydra listens on a socket to the MPI library (PMI-1). If Hydra
    ignores a request there, Hydra still reacts to a rank killed by a signal.
    """
    descriptor = hydras_socket()
    if descriptor is None:
        return
    with contextlib.suppress(OSError):
        os.write(descriptor, f"cmd=abort exitcode={code}\n".encode())
    time.sleep(_HYDRA_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _tell_slurm() -> None:
    """End a step of srun from a rank without initialized MPI.

    Without the option -K, srun lets the remaining ranks wait in MPI_Init for ever.
    """
    step = srun_step()
    if step is None:
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # no scancel on this node
        answer = subprocess.run(
            ["scancel", step],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SLURM_S,
        )
        if answer.returncode == 0:
            time.sleep(_SLURM_S)  # this rank is killed with all ranks
