"""Which process is the rank. Its children are not: what they do is no word of the rank's.

A rank may start other processes: a DataLoader's workers, a program that draws a figure. They
inherit all that tells of a rank: its environment, its exception hook and exit handlers, its
descriptors. A child that fails would end the job, and would write to the launcher by a number that
is another file's there.

So the first process of a launcher's that imports this package says in its environment that it is
the rank. A job that is started inside it inherits that, too. Its ranks are known by the names that
their launcher gives them; Hydra gives none, but a socket to each. Imports nothing of MPI. Local.
"""

from __future__ import annotations

import contextlib
import os
import socket

from ...errors import UserError
from ..job_environment import (
    FOLDER,
    RANK_PROCESS,
    is_hydra,
    launched_rank,
    launched_size,
    launcher_name,
    srun_step,
)

_HAS_WORLD = "has made the world"

_process: int | None = None  # this one, if it is the rank
_held: set[int] = set()


def claim() -> None:
    """This process is the rank, where a launcher has started it, and no other process has said that
    it is. Calling it again changes nothing."""
    global _process
    process, _ = _said()
    if _process is None and launched_size() is not None and process is None:
        _process = os.getpid()
        _say()


def claim_world() -> None:
    """This process makes the world: so it is the rank, unless that is another process, which has
    made the world already and has then started this one.

    Raises:
        UserError: it has.
    """
    global _process
    process, state = _said()
    launched = launcher_name() is not None  # else every process has a world of its own
    if launched and process not in (None, os.getpid()) and state == _HAS_WORLD:
        raise UserError(
            f"Communicator.world() must be called in the process of a rank: rank "
            f"{launched_rank() or 0} is process {process}, which has made the world, and then "
            f"started process {os.getpid()}. Communicator.single() is for work of that one alone"
        )
    _process = os.getpid()
    if launched:
        _say(_HAS_WORLD)


def is_rank() -> bool:
    """Whether this process is the rank, and neither forked by it nor started by it otherwise."""
    return _process == os.getpid()


def parent_rank_process() -> int | None:
    """The process of the rank that has started this one; None where this is no child of a rank."""
    process, _ = _said()
    return None if process == os.getpid() else process


def parent_has_world() -> bool:
    """Whether the rank that has started this process had made the world by then."""
    return parent_rank_process() is not None and _said()[1] == _HAS_WORLD


def hydras_socket() -> int | None:
    """The descriptor over which MPICH's mpiexec (Hydra) listens to this process; None where it has
    started another one, or this one's parent has closed it. The number may then be of any file."""
    number = os.environ.get("PMI_FD", "")
    if not is_hydra(os.environ) or not number.isdecimal():
        return None
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as found:
        if found.family == socket.AF_UNIX and not (found.getsockname() or found.getpeername()):
            return int(number)  # one of a pair, as Hydra gives them
    return None


def close_in_children(descriptor: int) -> None:
    """Close it in what this process forks. In what that one forks the number may be another's."""
    _held.add(descriptor)


def _said() -> tuple[int | None, str]:
    """The process that is the rank as far as the environment says, and how far it is; None where
    that is the rank of another job."""
    process, job, connection, state = (*os.environ.get(RANK_PROCESS, "").split("|"), *[""] * 4)[:4]
    same = job == _job() and _connection() in ("", connection)
    return (int(process), state) if process.isdecimal() and same else (None, "")


def _say(state: str = "") -> None:
    os.environ[RANK_PROCESS] = f"{os.getpid()}|{_job()}|{_connection()}|{state}"


def _job() -> str:
    """What tells a job from one that is started inside it."""
    names = (FOLDER, "PMIX_NAMESPACE", "FLUX_JOB_ID", "PMI_RANK", "PMI_SIZE")
    told = [os.environ.get(name, "").replace("|", "") for name in names]
    return " ".join([*told, srun_step() or ""])


def _connection() -> str:
    """What tells this process's socket of Hydra's from others; nothing where it has none."""
    descriptor = hydras_socket()
    return "" if descriptor is None else str(os.fstat(descriptor).st_ino)


def _in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_in_child)
