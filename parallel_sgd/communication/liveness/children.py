"""Kill the processes forked by a rank, such as DataLoader workers, when the rank is killed.

These processes hold the rank's standard output, so mpiexec would wait for all of them, and a
fault-tolerant job would never end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading

_PR_SET_PDEATHSIG = 1  #: Linux: a signal at the end of the forking thread

_begun = False
_forks: tuple[int, bool] = (0, False)  # the forking process; True if its main thread forks


def kill_children_with_this_process() -> None:
    """Kill later forks of this process's main thread when this process exits. Local."""
    global _begun
    if not _begun:
        _begun = True
        prctl = ctypes.CDLL(None).prctl
        os.register_at_fork(before=_note, after_in_child=lambda: _follow(prctl))


def _note() -> None:
    global _forks
    _forks = os.getpid(), threading.current_thread() is threading.main_thread()


def _follow(prctl: ctypes._NamedFuncPointer) -> None:
    parent, by_main_thread = _forks
    if by_main_thread:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # the parent exited before prctl
            os._exit(1)
