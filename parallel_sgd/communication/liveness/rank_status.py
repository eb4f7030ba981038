"""Report the status of each rank to `parallel-sgd run`, to name a failed rank.

The launcher makes a folder and names it in the environment. A rank on the launcher's host opens a
pipe in this folder and writes its status to the pipe; a rank on a remote host writes small files. A
rank without a final status was killed, or ended outside this package's control. Without a launcher
nothing happens. Local.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

from ..job_environment import ERRORS, FOLDER, fault_tolerant, launched_rank
from ..stderr import write_stderr
from .exit_notifier import ExitNotifier
from .heartbeat import FILE, own
from .rank_process import close_in_children, is_rank

PROCESS, ON, EXITED, TRAINS = "process", "on", "gone", "trains"
"""Kinds of status, and suffixes of files: process id, and the open pipe; rank started; process on
another host exited; learner made."""

PREEMPTION_REQUESTED, CHECKPOINT = "asked", "checkpoint"
"""Rank was asked to stop; newest checkpoint known to be written."""

ALL_FINISHED = "together"
"""Rank has seen all ranks finish."""

BEGUN, OVER = "begun", "over"
"""Training session, with its number, has begun; is over (successfully, or by a reported error)."""

ERROR, SHARED_ERROR = "error", "shared"
"""Error for the launcher to print, with a number: of one rank, or raised by all ranks together."""

FINISHED, FAILED, LOST, PREEMPTED = END_STATUSES = "left", "failed", "lost", "preempted"
"""Final status of a rank: program finished; error reported; gave up waiting for an unresponsive or
failed rank; state saved by all ranks on request. Files are empty: a full disk has room for them."""

#: Lowest descriptor for the pipe. An exiting process closes its highest descriptors first, so the
#: pipe before the connection to mpiexec, which then ends all ranks.
_CLOSED_FIRST = 200

#: Shortest limit for MPI_Finalize: foreign exit handlers may run before it.
_LEAST_S = 60.0

_rank_process: int | None = None  # process id of the rank, different in its children
_pipe: int | None = None  # pipe to a launcher on this host
_errors = 0  # number of errors handed to the launcher
_end_status: str | None = None  # one of `END_STATUSES`, once reported
_exit_notifier: ExitNotifier | None = None


def report_start() -> None:
    """Report the start of this rank, unless this process was started by a rank."""
    global _rank_process, _exit_notifier
    if not is_rank():
        return
    _rank_process = os.getpid()
    heartbeat_table = status_file(FILE, of_rank=False)
    if heartbeat_table is not None:
        own.join_launcher_table(heartbeat_table, launched_rank() or 0)
    place = status_file(PROCESS)
    if place is None:
        return
    try:
        _open_pipe(place)
    except OSError:  # no launcher on this host: it cannot see this process
        exit_file = status_file(EXITED)
        if fault_tolerant() and exit_file is not None:
            _exit_notifier = ExitNotifier(exit_file)
    else:
        _report(PROCESS, str(_rank_process))
    _report(ON)


def _open_pipe(place: Path) -> None:
    """Open the pipe at `place` until this process ends."""
    global _pipe
    opened = os.open(place, os.O_WRONLY | os.O_NONBLOCK)
    try:
        pipe = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, _CLOSED_FIRST)
    finally:
        os.close(opened)
    close_in_children(pipe)
    _pipe = pipe


def report_end(why: str) -> None:
    """Report the final status of this rank. The first report holds.

    One exception: after `FINISHED` (in MPI.Finalize) a program may still fail.

    Args:
        why: one of `END_STATUSES`.
    """
    global _end_status
    fails_after_finish = _end_status == FINISHED and why in (FAILED, LOST)
    if _end_status is not None and not fails_after_finish:
        return
    finished_file = status_file(FINISHED)
    if fails_after_finish and finished_file is not None:
        finished_file.unlink(missing_ok=True)
    _end_status = why
    _report(why)


def limit_finalize_time() -> None:
    """End this process by SIGALRM if it does not exit in time.

    As Python exits, its threads end, so no watchdog bounds MPI_Finalize, a wait for all ranks.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(own.timeout_s, _LEAST_S))


def report_training() -> None:
    """Report that this rank has made a learner: recovery is possible from here on."""
    global _exit_notifier
    if fault_tolerant():
        _report(TRAINS)
    if _exit_notifier is not None:
        _exit_notifier.stop()
        _exit_notifier = None


def report_preemption_request() -> None:
    """Report that this rank was asked to stop, before it may end."""
    _report(PREEMPTION_REQUESTED)


def report_checkpoint(path: Path) -> None:
    """Report a complete checkpoint on disk."""
    _report(CHECKPOINT, str(path.resolve()))


def report_all_finished() -> None:
    """Report the finish of all ranks, as seen by this rank."""
    _report(ALL_FINISHED)


def report_session(number: int, what: str) -> None:
    """Report that a training session of all ranks has `BEGUN`, or is `OVER`.

    Args:
        number: number of the session, the same on all ranks. Different ranks may report begin and
            end.
        what: `BEGUN` or `OVER`.
    """
    _report(f"{number}.{what}")


def report_error(text: str, *, shared: bool = False) -> bool:
    """Hand an error to the launcher, for a single printout of equal errors. Local.

    Args:
        text: lines of the error.
        shared: all ranks raise this error by agreement.

    Returns:
        True if the launcher has the error. Otherwise this rank must print it: no launcher on this
        host prints errors, the program has replaced standard error, or the text is too long.

    Does not wait.
    """
    global _errors
    if os.environ.get(ERRORS) != "1" or sys.stderr is not sys.__stderr__:
        return False
    _errors += 1
    return _write(f"{_errors}.{SHARED_ERROR if shared else ERROR}", text)


def status_file(suffix: str, *, of_rank: bool = True) -> Path | None:
    """Return the path of a status file of this rank or the job, or None without a launcher."""
    folder, rank = os.environ.get(FOLDER), launched_rank()
    if _rank_process != os.getpid() or rank is None or not folder or not os.path.isdir(folder):
        return None
    return Path(folder, f"{rank}.{suffix}" if of_rank else suffix)


def _report(what: str, text: str = "") -> None:
    """Write a status to the pipe (without disk space), or else to a file."""
    if _rank_process != os.getpid() or _write(what, text):
        return
    place = status_file(what)
    if place is None:  # no launcher, or no folder any more
        return
    try:
        place.write_bytes(os.fsencode(text))
    except OSError as error:
        rank = launched_rank()
        write_stderr(
            f"[rank {rank}] parallel_sgd: the launcher could not be told {what!r}: {error}"
        )


def _write(what: str, text: str) -> bool:
    """Write a status to this rank's pipe, whole or not at all. Return True if written."""
    line = json.dumps([time.time(), what, text]).encode() + b"\n"
    if _rank_process == os.getpid() and _pipe is not None and len(line) <= select.PIPE_BUF:
        with contextlib.suppress(OSError):  # full (the launcher is stopped) or closed
            os.write(_pipe, line)
            return True
    return False
