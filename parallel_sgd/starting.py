"""Startup of our own programs: Ctrl-C prints one line, without a traceback of the imports.

The package imports this module first, because the remaining imports take a second, and NumPy would
even turn the interrupt into an ImportError. Local.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

__all__ = ["begin", "started"]


def begin() -> None:
    """Install the interrupt handler, if this process is a program of ours: an interrupt then ends
    the process in one line. Also open closed standard streams (``>&-``)."""
    if not _is_own_program():
        return
    _open_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def started() -> None:
    """Remove the interrupt handler. Entry points call this once they handle interrupts
    themselves."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_streams() -> None:
    """Open the null device for each closed standard stream: otherwise the next opened file would
    get the stream's number, and its output."""
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
    """Return True for `parallel-sgd`, for the train.py next to this package, and for the package's
    modules."""
    words, script = sys.orig_argv, sys.argv[0] if sys.argv else ""
    if script == "-m" and "-m" in words[:-1]:
        return words[words.index("-m") + 1].partition(".")[0] == __package__
    train_script = Path(__file__).parents[1] / "train.py"
    return os.path.basename(script) == "parallel-sgd" or os.path.realpath(script) == str(
        train_script
    )


def _end(number: int, frame: FrameType | None) -> None:
    """End the process by the signal itself: an mpiexec reacts to that also before MPI has
    started."""
    os.write(sys.stderr.fileno(), b"parallel-sgd: interrupted\n")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
