"""Ctrl-C while one of our own programs starts: one line, and no traceback of what it imports.

The first thing that the package imports, since the rest takes a second; NumPy would even turn the
interrupt into an ImportError. Local.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

__all__ = ["begin", "started"]


def begin() -> None:
    """From now on an interrupt ends this process in one line, if it is a program of ours; and its
    standard streams are there, also where it was started without one (``>&-``)."""
    if not _is_own_program():
        return
    _open_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def started() -> None:
    """Entry points call this as they begin to handle interrupts themselves."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_streams() -> None:
    """Open the null device for each standard stream that is closed: else the next file that is
    opened gets its number, and what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor != number:
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.set_inheritable(number, True)
        setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def _is_own_program() -> bool:
    """`parallel-sgd`, the train.py beside this package, or one of its modules."""
    words, script = sys.orig_argv, sys.argv[0] if sys.argv else ""
    if script == "-m" and "-m" in words[:-1]:
        return words[words.index("-m") + 1].partition(".")[0] == __package__
    beside = Path(__file__).parents[1] / "train.py"
    return os.path.basename(script) == "parallel-sgd" or os.path.realpath(script) == str(beside)


def _end(number: int, frame: FrameType | None) -> None:
    """By the signal itself, which an mpiexec heeds also where MPI is not up."""
    os.write(sys.stderr.fileno(), b"parallel-sgd: interrupted\n")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
