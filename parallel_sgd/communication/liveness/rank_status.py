"""A rank signs on with `parallel-sgd run`, and off: so that one which is gone can be named.

The launcher makes a folder and names it in the environment. A rank on its host holds a pipe open
that it finds there, and writes into it what there is to tell; another one writes small files. What
ends without having signed off was killed, or ended itself behind everybody's back. All this is a
courtesy: where there is no launcher, nothing happens. Local.
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
"""Kinds of what a rank tells, and suffixes of its files: the number of its process, and the pipe
that it holds; that it has signed on; that it has died on another host; that it has made a
learner."""

PREEMPTION_REQUESTED, CHECKPOINT = "asked", "checkpoint"
"""Of a rank: that it was asked to leave; the newest checkpoint that it knows to be
written."""

ALL_FINISHED = "together"
"""Of a rank that has seen all others come to their end."""

BEGUN, OVER = "begun", "over"
"""Of a piece of work of all ranks that one of them brings to its end, a training session:
with its number, that it has begun, and that it is over (well, or by an error that was told)."""

ERROR, SHARED_ERROR = "error", "shared"
"""Of an error that the launcher prints, with a number before it: one rank's, or one that all ranks
have agreed to raise."""

FINISHED, FAILED, LOST, PREEMPTED = END_STATUSES = "left", "failed", "lost", "preempted"
"""Why a rank has ended: its program is at its end; it has said what is wrong; it
waits in vain for another rank, which is silent or dead; all ranks have saved their state, as they
were asked to. As files they are empty: a full disk has room for them."""

#: A process that ends closes its highest descriptors first. mpiexec, which ends the other ranks as
#: soon as one has closed its connection, has a lower one.
_CLOSED_FIRST = 200

#: The shortest limit of MPI_Finalize: exit handlers of others may come before it.
_LEAST_S = 60.0

_signed_on: int | None = None  # this process, and no child of it
_pipe: int | None = None  # to a launcher on this host
_errors = 0  # that this rank has handed over
_end_status: str | None = None  # of `END_STATUSES`, that this rank has told
_exit_notifier: ExitNotifier | None = None  # where one is needed


def report_start() -> None:
    """This process is a rank, from now on; not one that a rank has started."""
    global _signed_on, _exit_notifier
    if not is_rank():
        return
    _signed_on = os.getpid()
    heartbeat_table = status_file(FILE, of_rank=False)
    if heartbeat_table is not None:
        own.join_launcher_table(heartbeat_table, launched_rank() or 0)
    place = status_file(PROCESS)
    if place is None:
        return
    try:
        _open_pipe(place)
    except OSError:  # no launcher on this host: then this rank is not named
        gone = status_file(EXITED)
        if fault_tolerant() and gone is not None:
            _exit_notifier = ExitNotifier(gone)
    else:
        _report(PROCESS, str(_signed_on))
    _report(ON)


def _open_pipe(place: Path) -> None:
    """Open the pipe that is there, until the end of this process."""
    global _pipe
    opened = os.open(place, os.O_WRONLY | os.O_NONBLOCK)
    try:
        pipe = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, _CLOSED_FIRST)
    finally:
        os.close(opened)
    close_in_children(pipe)
    _pipe = pipe


def report_end(why: str) -> None:
    """This rank ends, and has said all that there is to say. Of several reasons the first holds.
    But behind its end, which MPI.Finalize is, a program may yet fail."""
    global _end_status
    fails_at_last = _end_status == FINISHED and why in (FAILED, LOST)
    if _end_status is not None and not fails_at_last:
        return
    left = status_file(FINISHED)
    if fails_at_last and left is not None:
        left.unlink(missing_ok=True)
    _end_status = why
    _report(why)


def limit_finalize_time() -> None:
    """Have this process end by SIGALRM if it does not end soon: as Python ends, its threads do, and
    nobody watches any more that MPI_Finalize, which waits for all ranks, comes to its end."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(own.timeout_s, _LEAST_S))


def report_training() -> None:
    """This rank has made a learner: where ranks survive each other, they do from here on."""
    global _exit_notifier
    if fault_tolerant():
        _report(TRAINS)
    if _exit_notifier is not None:
        _exit_notifier.leave()
        _exit_notifier = None


def report_preemption_request() -> None:
    """This rank was asked to leave, and may not come to it."""
    _report(PREEMPTION_REQUESTED)


def report_checkpoint(path: Path) -> None:
    """A checkpoint is whole and on the disk."""
    _report(CHECKPOINT, str(path.resolve()))


def report_all_finished() -> None:
    """All ranks have come to their end, as this one has seen."""
    _report(ALL_FINISHED)


def report_session(number: int, what: str) -> None:
    """A piece of work of all ranks has `BEGUN`, or is `OVER`.

    Args:
        number: of it, the same on all ranks. Who ends it may be another rank than has begun it.
    """
    _report(f"{number}.{what}")


def report_error(text: str, *, shared: bool = False) -> bool:
    """Leave an error to the launcher, which prints once what several ranks say.

    Args:
        text: its lines.
        shared: whether all ranks raise it, because they have agreed to.

    Returns:
        Whether the launcher has it. Else this rank is to print it: no launcher on this host prints
        errors, the program has put another stream in the place of standard error, or the text is
        too long.

    Local. Waits for nobody.
    """
    global _errors
    if os.environ.get(ERRORS) != "1" or sys.stderr is not sys.__stderr__:
        return False
    _errors += 1
    return _write(f"{_errors}.{SHARED_ERROR if shared else ERROR}", text)


def status_file(suffix: str, *, of_rank: bool = True) -> Path | None:
    """A file of this rank's, or of all; None where no launcher wants to know of it."""
    folder, rank = os.environ.get(FOLDER), launched_rank()
    if _signed_on != os.getpid() or rank is None or not folder or not os.path.isdir(folder):
        return None
    return Path(folder, f"{rank}.{suffix}" if of_rank else suffix)


def _report(what: str, text: str = "") -> None:
    """By the pipe, which needs nothing of a disk; else by a file."""
    if _signed_on != os.getpid() or _write(what, text):
        return
    place = status_file(what)
    if place is None:  # the launcher sees that, too
        return
    try:
        place.write_bytes(os.fsencode(text))
    except OSError as error:
        rank = launched_rank()
        write_stderr(
            f"[rank {rank}] parallel_sgd: the launcher could not be told {what!r}: {error}"
        )


def _write(what: str, text: str) -> bool:
    """Write into the pipe of this rank, whole or not at all; whether that was possible."""
    line = json.dumps([time.time(), what, text]).encode() + b"\n"
    if _signed_on == os.getpid() and _pipe is not None and len(line) <= select.PIPE_BUF:
        with contextlib.suppress(OSError):  # it is full, of a launcher that is stopped; or closed
            os.write(_pipe, line)
            return True
    return False
