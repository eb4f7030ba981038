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
import subprocess
import sys
import threading
import time
from enum import StrEnum
from pathlib import Path

from ..job_environment import ERRORS, FOLDER, fault_tolerant, launched_rank
from ..stderr import write_stderr
from .heartbeat import FILE, own
from .rank_process import close_in_children, is_rank


class Status(StrEnum):
    """Status of a rank. The value is its name in the rank's pipe, and the suffix of its file.

    The files of end statuses are empty: a full disk has room for them.
    """

    PROCESS = "process"  #: process id; the suffix of the pipe, too
    STARTED = "on"  #: rank started
    EXITED = "gone"  #: process on another host exited
    TRAINS = "trains"  #: learner made: recovery is possible from here on
    PREEMPTION_REQUESTED = "asked"  #: rank asked to stop, before it may end
    CHECKPOINT = "checkpoint"  #: newest complete checkpoint on disk
    SESSION_BEGUN = "begun"  #: training session of all ranks, with its number
    SESSION_FINISHED = "over"  #: same session finished, perhaps reported by another rank
    ALL_FINISHED = "together"  #: rank has seen all ranks finish
    ERROR = "error"  #: error for the launcher to print, with a number
    SHARED_ERROR = "shared"  #: the same, raised by all ranks together
    FINISHED = "left"  #: end: program finished
    FAILED = "failed"  #: end: error reported
    LOST = "lost"  #: end: gave up waiting for an unresponsive or failed rank
    PREEMPTED = "preempted"  #: end: state saved by all ranks on request


END_STATUSES = Status.FINISHED, Status.FAILED, Status.LOST, Status.PREEMPTED

#: Program of the notifier. Its stdin is closed when the rank exits.
_NOTIFIER = """
import sys
sys.stdin.read()
try:
    open(sys.argv[1], "w").close()
except OSError:  # the job is over, and the folder not there any more
    pass
"""

#: Lowest descriptor for the pipe. An exiting process closes its highest descriptors first, so the
#: pipe before the connection to mpiexec, which then ends all ranks.
_CLOSED_FIRST = 200

#: Shortest limit for MPI_Finalize: foreign exit handlers may run before it.
_LEAST_S = 60.0

_rank_process: int | None = None  # process id of the rank, different in its children
_pipe: int | None = None  # pipe to a launcher on this host
_errors = 0  # number of errors handed to the launcher
_end_status: Status | None = None  # one of `END_STATUSES`, once reported
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
    place = status_file(Status.PROCESS)
    if place is None:
        return
    try:
        _open_pipe(place)
    except OSError:  # no launcher on this host: it cannot see this process
        exit_file = status_file(Status.EXITED)
        if fault_tolerant() and exit_file is not None:
            _exit_notifier = ExitNotifier(exit_file)
    else:
        report_status(Status.PROCESS, str(_rank_process))
    report_status(Status.STARTED)


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


def report_status(status: Status, text: str = "", *, number: int | None = None) -> None:
    """Report a status of this rank: to the pipe (without disk space), or else to a file. Local.

    Of the end statuses the first report holds, with one exception: after `FINISHED` (in
    MPI.Finalize) a program may still fail.

    Args:
        text: process id, or path of a checkpoint.
        number: number of the training session, the same on all ranks.
    """
    if status in END_STATUSES and not _set_end(status):
        return
    name = str(status) if number is None else f"{number}.{status}"
    if _rank_process == os.getpid() and not _write(name, text):
        _write_file(name, text)
    if status is Status.TRAINS:
        _stop_exit_notifier()


def _write_file(name: str, text: str) -> None:
    place = status_file(name)
    if place is None:  # no launcher, or no folder any more
        return
    try:
        place.write_bytes(os.fsencode(text))
    except OSError as error:
        write_stderr(
            f"[rank {launched_rank()}] parallel_sgd: the status {name!r} could not be reported to "
            f"the launcher: {error}"
        )


def _set_end(status: Status) -> bool:
    """Set the end status of this rank. Return False if an earlier one holds."""
    global _end_status
    fails_after_finish = _end_status is Status.FINISHED and status in (Status.FAILED, Status.LOST)
    if _end_status is not None and not fails_after_finish:
        return False
    finished_file = status_file(Status.FINISHED)
    if fails_after_finish and finished_file is not None:
        finished_file.unlink(missing_ok=True)
    _end_status = status
    return True


def _stop_exit_notifier() -> None:
    global _exit_notifier
    if _exit_notifier is not None:
        _exit_notifier.stop()
        _exit_notifier = None


def limit_finalize_time() -> None:
    """End this process by SIGALRM if it does not exit in time.

    As Python exits, its threads end, so no watchdog bounds MPI_Finalize, a wait for all ranks.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(own.timeout_s, _LEAST_S))


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
    return _write(f"{_errors}.{Status.SHARED_ERROR if shared else Status.ERROR}", text)


def status_file(suffix: str, *, of_rank: bool = True) -> Path | None:
    """Return the path of a status file of this rank or the job, or None without a launcher."""
    folder, rank = os.environ.get(FOLDER), launched_rank()
    if _rank_process != os.getpid() or rank is None or not folder or not os.path.isdir(folder):
        return None
    return Path(folder, f"{rank}.{suffix}" if of_rank else suffix)


def _write(what: str, text: str) -> bool:
    """Write a status to this rank's pipe, whole or not at all. Return True if written."""
    line = json.dumps([time.time(), what, text]).encode() + b"\n"
    if _rank_process == os.getpid() and _pipe is not None and len(line) <= select.PIPE_BUF:
        with contextlib.suppress(OSError):  # full (the launcher is stopped) or closed
            os.write(_pipe, line)
            return True
    return False


class ExitNotifier:
    """Makes a file when this process exits, by a small process beside the rank.

    For a rank on a remote host, before recovery is possible: the launcher cannot see the rank's
    process, and MPI does not end the wait of the remaining ranks in MPI_Init.

    Args:
        place: path of the file.

    Local. Cost: a bare interpreter, some 10 ms in the background.
    """

    def __init__(self, place: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _NOTIFIER, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def stop(self) -> None:
        """Stop the notifier: from now on the exit of this process needs no report."""
        self._process.kill()
        # bounded: it has been sent SIGKILL
        self._process.communicate()
