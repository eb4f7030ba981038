"""A rank signs on with `parallel-sgd run`, and off: so that one which is gone can be named.

The launcher makes a folder and names it in the environment; ranks on its host hold a pipe open that
they find there, and write small files. What ends without having signed off was killed, or ended
itself behind everybody's back. All this is a courtesy: where the folder is not there, or cannot be
written to, nothing happens. Local.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from pathlib import Path

from .board import FILE, own
from .launched import FOLDER, launched_rank, survives
from .mourner import Mourner
from .rank_process import close_in_children, is_rank

PROCESS, ON, GONE, TRAINS = "process", "on", "gone", "trains"
"""Suffixes of a rank's files: the pipe that it holds, which tells the number of its process; that
it has signed on, which is seen from other hosts, too, where they share the folder; that it has died
on one of those; that it has made a learner."""

ASKED, CHECKPOINT = "asked", "checkpoint"
"""Suffixes of a rank's files: that it was asked to leave; the newest checkpoint that it knows to be
written."""

TOGETHER = "together"
"""Suffix of a file of a rank that has seen all others come to their end."""

BEGUN, OVER = "begun", "over"
"""Suffixes for a piece of work of all ranks that one of them brings to its end, a training session:
with its number, that it has begun, and that it is over (well, or by an error that was told)."""

LEFT, FAILED, LOST, PREEMPTED = WORDS = "left", "failed", "lost", "preempted"
"""Suffixes that say why a rank has ended: its program is at its end; it has said what is wrong; it
waits in vain for another rank, which is silent or dead; all ranks have saved their state, as they
were asked to. The files are empty: a full disk has room for them."""

#: A process that ends closes its highest descriptors first. mpiexec, which ends the other ranks as
#: soon as one has closed its connection, has a lower one.
_CLOSED_FIRST = 200

#: The shortest limit of MPI_Finalize: exit handlers of others may come before it.
_LEAST_S = 60.0

_signed_on: int | None = None  # this process, and no child of it
_mourner: Mourner | None = None  # where one is needed


def sign_on() -> None:
    """This process is a rank, from now on; not one that a rank has started."""
    global _signed_on, _mourner
    if not is_rank():
        return
    _signed_on = os.getpid()
    board = place_of(FILE, of_rank=False)
    if board is not None:
        own.sign_on(board, launched_rank() or 0)
    place = place_of(PROCESS)
    if place is None:
        return
    _write(ON, "")
    try:
        _hold(place)
    except OSError:  # no launcher on this host: then this rank is not named
        gone = place_of(GONE)
        if survives() and gone is not None:
            _mourner = Mourner(gone)


def _hold(place: Path) -> None:
    """Open the pipe that is there, until the end of this process, and tell its number."""
    opened = os.open(place, os.O_WRONLY | os.O_NONBLOCK)
    try:
        pipe = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, _CLOSED_FIRST)
    finally:
        os.close(opened)
    close_in_children(pipe)
    os.write(pipe, f"{_signed_on}\n".encode())


def sign_off(why: str) -> None:
    """This rank ends, and has said all that there is to say. Of several reasons the first holds.
    But behind its end, which MPI.Finalize is, a program may yet fail."""
    left = place_of(LEFT)
    if why in (FAILED, LOST) and left is not None:
        with contextlib.suppress(OSError):
            left.unlink()
    places = [place_of(word) for word in WORDS]
    if not any(place and place.exists() for place in places):
        _write(why, "")


def limit_the_end() -> None:
    """Have this process end by SIGALRM if it does not end soon: as Python ends, its threads do, and
    nobody watches any more that MPI_Finalize, which waits for all ranks, comes to its end."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(own.timeout_s, _LEAST_S))


def note_training() -> None:
    """This rank has made a learner: where ranks survive each other, they do from here on."""
    global _mourner
    if survives():
        _write(TRAINS, "")
    if _mourner is not None:
        _mourner.leave()
        _mourner = None


def note_asked() -> None:
    """This rank was asked to leave, and may not come to it."""
    _write(ASKED, "")


def note_checkpoint(path: Path) -> None:
    """A checkpoint is whole and on the disk."""
    _write(CHECKPOINT, f"{path.resolve()}\n")


def note_all_left() -> None:
    """All ranks have come to their end, as this one has seen."""
    _write(TOGETHER, "")


def note_work(number: int, what: str) -> None:
    """A piece of work of all ranks has `BEGUN`, or is `OVER`.

    Args:
        number: of it, the same on all ranks. Who ends it may be another rank than has begun it.
    """
    _write(f"{number}.{what}", "")


def place_of(suffix: str, *, of_rank: bool = True) -> Path | None:
    """A file of this rank's, or of all; None where no launcher wants to know of it."""
    folder, rank = os.environ.get(FOLDER), launched_rank()
    if _signed_on != os.getpid() or rank is None or not folder or not os.path.isdir(folder):
        return None
    return Path(folder, f"{rank}.{suffix}" if of_rank else suffix)


def _write(suffix: str, text: str) -> None:
    place = place_of(suffix)
    if place is not None:
        with contextlib.suppress(OSError):  # a full disk, say
            place.write_bytes(os.fsencode(text))
