"""Which process is the rank. Its children are not: what they do is no word of the rank's.

A rank may start other processes: a DataLoader's workers, a program that draws a figure. They
inherit all that tells of a rank: its environment, its exception hook and exit handlers, its
descriptors. A child that fails would end the job, and would write to the launcher by a number that
is another file's there.

So the first process of a launcher's that imports this package says in its environment that it is
the rank. Imports nothing of MPI. Local.
"""

from __future__ import annotations

import contextlib
import os

from ..errors import UserError
from .launched import FOLDER, RANK_PROCESS, launched_rank, launched_size, launcher_name, srun_step

_HAS_WORLD = "has made the world"

_process: int | None = None  # this one, if it is the rank
_held: set[int] = set()


def claim() -> None:
    """This process is the rank, where a launcher has started it, and no other process has said that
    it is. Calling it again changes nothing."""
    global _process
    process, job, _ = _said()
    if _process is None and launched_size() is not None and (process is None or job != _job()):
        _process = os.getpid()
        _say()


def claim_world() -> None:
    """This process makes the world: so it is the rank, unless that is another process, which has
    made the world already and has then started this one.

    Raises:
        UserError: it has.
    """
    global _process
    process, job, state = _said()
    launched = launcher_name() is not None  # else every process has a world of its own
    if launched and process != os.getpid() and job == _job() and state == _HAS_WORLD:
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


def rank_above() -> int | None:
    """The process of the rank that has started this one; None where this is no child of a rank."""
    process, job, _ = _said()
    return process if process != os.getpid() and job == _job() else None


def close_in_children(descriptor: int) -> None:
    """Close it in what this process forks. In what that one forks the number may be another's."""
    _held.add(descriptor)


def _said() -> tuple[int | None, str, str]:
    """The process that is the rank as far as the environment says, its job, and how far it is."""
    process, job, state = (*os.environ.get(RANK_PROCESS, "").split("|"), "", "")[:3]
    return int(process) if process.isdecimal() else None, job, state


def _say(state: str = "") -> None:
    os.environ[RANK_PROCESS] = f"{os.getpid()}|{_job()}|{state}"


def _job() -> str:
    """What tells a job from one that is started inside it."""
    names = (FOLDER, "PMIX_NAMESPACE", "PMI_RANK", "PMI_SIZE")
    told = [os.environ.get(name, "").replace("|", "") for name in names]
    return " ".join([*told, srun_step() or ""])


def _in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_in_child)
