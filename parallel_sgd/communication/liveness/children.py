"""Processes that a rank has forked, such as a DataLoader's workers, end when the rank is killed.

They hold the rank's standard output, so that mpiexec would wait for them: the job of ranks that
survive each other would not come to its end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading

_PR_SET_PDEATHSIG = 1  #: Linux's: of the thread that has forked

_begun = False
_forks: tuple[int, bool] = (0, False)  # the process that forks, and whether its main thread does


def kill_children_with_this_process() -> None:
    """From now on kill what this process's main thread forks when this process dies. Local."""
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
        if os.getppid() != parent:  # it has died meanwhile
            os._exit(1)
