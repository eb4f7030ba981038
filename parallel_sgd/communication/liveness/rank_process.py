"""Identify the process of the rank, as opposed to its child processes.

A rank may start processes: DataLoader workers, a program to draw a figure. These inherit the
environment, exception hook, exit handlers and descriptors of the rank. Without this module a
failing child would end the job, and would write to the launcher through a descriptor number reused
for another file.

So the first process of a launcher to import this package records its process id in its environment.
A job started inside this job inherits the record, too. Its ranks are recognized by the names from
their launcher; Hydra gives no names, but a socket to each rank. Imports nothing of MPI. Local.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading

from ...errors import UserError
from ..job_environment import (
    FOLDER,
    RANK_PROCESS,
    TORCH_JOB,
    is_hydra,
    launched_rank,
    launched_size,
    launcher_name,
    srun_step,
    torch_ranks,
)

_HAS_WORLD = "has made the world"

_PR_SET_PDEATHSIG = 1  #: Linux: a signal at the end of the forking thread

_process: int | None = None  # the rank's process id, in the rank itself
_joined: tuple[int, int] | None = None  # rank and size, in a world without MPI
_closed_in_children: set[int] = set()
_kills_children = False
_forks: tuple[int, bool] = (0, False)  # the forking process; True if its main thread forks


def claim() -> None:
    """Make this process the rank, if a launcher started it and no process is the rank yet.

    Calling it again changes nothing.
    """
    global _process
    process, _ = _read_record()
    launched = launched_size() is not None or torch_ranks() is not None
    if _process is None and launched and process is None:
        _process = os.getpid()
        _write_record()


def claim_world() -> None:
    """Make this process the rank, as the maker of the world.

    Raises:
        UserError: the process is a child of a rank with a world of its own.
    """
    global _process
    process, state = _read_record()
    by_torch = torch_ranks()
    launched = launcher_name() is not None or by_torch is not None  # else each has its own world
    if launched and process not in (None, os.getpid()) and state == _HAS_WORLD:
        rank = by_torch[0] if by_torch else launched_rank() or 0
        raise UserError(
            f"Communicator.world() must be called in the process of a rank: rank {rank} is process "
            f"{process}, which has made the world and then started process {os.getpid()}. Use "
            "Communicator.single() for work of that process alone"
        )
    _process = os.getpid()
    if launched:
        _write_record(_HAS_WORLD)


def join_world(rank: int, size: int) -> None:
    """Make this process the rank of a world without MPI.

    Args:
        rank, size: this rank and the number of ranks, in that world.
    """
    global _process, _joined
    _process, _joined = os.getpid(), (rank, size)


def world_without_mpi() -> tuple[int, int] | None:
    """Return this rank and the number of ranks in a world without MPI; None without such a world.

    The world has been joined, or torchrun has announced it. None also in child processes of the
    rank.
    """
    if not is_rank():
        return None
    return _joined or (torch_ranks() if launcher_name() is None else None)


def is_rank() -> bool:
    """Return True if this process is the rank itself, not forked or started by the rank."""
    return _process == os.getpid()


def parent_rank_process() -> int | None:
    """Return the process id of the rank that started this process, or None if no rank did."""
    process, _ = _read_record()
    return None if process == os.getpid() else process


def parent_has_world() -> bool:
    """Return True if the rank that started this process had made its world before."""
    return parent_rank_process() is not None and _read_record()[1] == _HAS_WORLD


def hydras_socket() -> int | None:
    """Return the descriptor of the socket to MPICH's mpiexec (Hydra), or None without a socket.

    None also if Hydra started a parent process, or a parent closed the descriptor. Its number may
    then belong to any file.
    """
    number = os.environ.get("PMI_FD", "")
    if not is_hydra(os.environ) or not number.isdecimal():
        return None
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as found:
        if found.family == socket.AF_UNIX and not (found.getsockname() or found.getpeername()):
            return int(number)  # an end of a socket pair, as made by Hydra
    return None


def close_in_children(descriptor: int) -> None:
    """Close a descriptor in forked children. In their own children the number may be reused."""
    _closed_in_children.add(descriptor)


def kill_children_with_this_process() -> None:
    """Kill later forks of this process's main thread when this process exits. Local.

    Forks such as DataLoader workers hold the rank's standard output. Otherwise mpiexec would wait
    for the forks of a killed rank, and a fault-tolerant job would never end.
    """
    global _kills_children
    if not _kills_children:
        _kills_children = True
        prctl = ctypes.CDLL(None).prctl
        os.register_at_fork(before=_note_fork, after_in_child=lambda: _follow(prctl))


def _note_fork() -> None:
    global _forks
    _forks = os.getpid(), threading.current_thread() is threading.main_thread()


def _follow(prctl: ctypes._NamedFuncPointer) -> None:
    parent, by_main_thread = _forks
    if by_main_thread:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # the parent exited before prctl
            os._exit(1)


def _read_record() -> tuple[int | None, str]:
    """Return the recorded rank process and its progress; None if the record is of another job."""
    process, job, connection, state = (*os.environ.get(RANK_PROCESS, "").split("|"), *[""] * 4)[:4]
    same = job == _job() and _connection() in ("", connection)
    return (int(process), state) if process.isdecimal() and same else (None, "")


def _write_record(state: str = "") -> None:
    os.environ[RANK_PROCESS] = f"{os.getpid()}|{_job()}|{_connection()}|{state}"


def _job() -> str:
    """Return an identifier of this job, different from a job started inside it."""
    names = (FOLDER, "PMIX_NAMESPACE", "FLUX_JOB_ID", "PMI_RANK", "PMI_SIZE", *TORCH_JOB)
    values = [os.environ.get(name, "").replace("|", "") for name in names]
    return " ".join([*values, srun_step() or ""])


def _connection() -> str:
    """Return an identifier of this process's socket to Hydra, or an empty string without one."""
    descriptor = hydras_socket()
    return "" if descriptor is None else str(os.fstat(descriptor).st_ino)


def _close_in_child() -> None:
    for descriptor in _closed_in_children:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _closed_in_children.clear()


os.register_at_fork(after_in_child=_close_in_child)
