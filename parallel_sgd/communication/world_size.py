"""Check that the world has all processes started to train one model together.

If a launcher and MPI do not match, each process would get a world of one rank, and would train a
separate model, with exit code 0. So the number of started processes is compared with MPI's: the
number from mpiexec or srun, the number requested from `parallel-sgd run`, the number from torchrun
and similar launchers, and the size of PyTorch's process group. Everything is local.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import UserError
from .job_environment import (
    REQUESTED_RANKS,
    launched_rank,
    launched_size,
    launcher_name,
    launcher_supports,
    read_integer,
)

_BOTH = "`parallel-sgd run` picks the right one, `parallel-sgd info` shows both"


class _Starter(NamedTuple):
    """A launcher whose processes connect without MPI, with its environment variables."""

    name: str  #: empty if only the variables are known
    size: str
    ranks: tuple[str, ...]  #: at least one must be set for `size` to count
    mark: str = ""  #: variable set only by this launcher; a shell may set those above


_STARTERS = (
    _Starter("torchrun", "WORLD_SIZE", ("RANK",), "TORCHELASTIC_RUN_ID"),
    _Starter("horovodrun", "HOROVOD_SIZE", ("HOROVOD_RANK",), "HOROVOD_RANK"),
    _Starter("", "WORLD_SIZE", ("RANK", "LOCAL_RANK")),
)


def require_whole(world_size: int, vendor: str, *, trains: bool = False) -> None:
    """Check that the world has all started processes.

    Args:
        world_size: number of ranks of MPI.COMM_WORLD; 1 without MPI.
        vendor: the MPI used by mpi4py, from `MPI.get_vendor()[0]`.
        trains: a learner is being made. Then a `multiprocessing` child with a world of its own is
            an error, too. (A data loading child may execute the program's first lines.)

    Raises:
        UserError: the numbers of started processes and of ranks differ.
    """
    problem = world_mismatch(world_size, vendor) or _group_mismatch(world_size)
    if problem is None and trains and world_size == 1:
        problem = _child_alone()
    if problem is not None:
        raise UserError(problem)


def world_mismatch(
    world_size: int, vendor: str, environ: Mapping[str, str] | None = None
) -> str | None:
    """Compare the MPI world with the environment.

    Args:
        world_size, vendor: as for `require_whole`.
        environ: environment variables; by default this process's.

    Returns:
        One line for a UserError, or None if the numbers agree or nothing is known.
    """
    environ = os.environ if environ is None else environ
    launched, name = launched_size(environ), launcher_name(environ)
    has = f"but this MPI world has {_ranks(world_size)}"
    rank = launched_rank(environ)
    if launched is None and rank is not None and rank >= world_size:
        return f"{name} started this process as rank {rank}, {has}. {_BOTH}"
    if launched is not None and launched != world_size:
        line = f"{name} started {_ranks(launched)}, {has}: mpi4py is bound to {vendor}"
        if name is not None and not launcher_supports(name, vendor):
            line += ", whose own mpiexec is required"
        else:
            line += ", and the two do not work together"
        return f"{line}. {_BOTH}"
    requested = read_integer(environ, REQUESTED_RANKS)
    if requested is not None and requested != world_size:
        return f"{_ranks(requested)} were requested, {has}"
    for starter in _STARTERS:
        size = read_integer(environ, starter.size) or 0
        present = [f"{name}={environ[name]}" for name in starter.ranks if name in environ]
        mark = bool(starter.mark) and starter.mark in environ
        is_this = mark if starter.mark else world_size == 1 and requested is None
        if size > world_size and present and is_this:
            said = f"{starter.size}={size}"
            if starter.name:
                variables = ", ".join([said, *present])
                line = f"{starter.name} started {size} processes ({variables}), {has}"
            else:
                line = (
                    f"{said} says that {size} processes were started ({', '.join(present)}), {has}"
                )
            line = f"{line}: each would train a separate model. {_advice(size)}"
            if not mark:
                line += (
                    f". If this process is the only one: unset {starter.size}, or "
                    "`parallel-sgd run -n 1`"
                )
            return line
    return None


def _group_mismatch(world_size: int) -> str | None:
    """Return a problem if PyTorch's process group is larger than the MPI world, else None."""
    size = group_size() or 0
    if size <= world_size:
        return None
    return (
        f"torch.distributed has a process group of {size} processes, but this MPI world has "
        f"{_ranks(world_size)}: each would train a separate model. {_advice(size)}"
    )


def group_size() -> int | None:
    """Return the size of PyTorch's default process group, or None without a group. Local."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_world_size())


def _child_alone() -> str | None:
    """Return a problem if `multiprocessing` started this process, else None.

    None also if the environment or PyTorch reports a single process.
    """
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is None or processes.parent_process() is None or launcher_name() is not None:
        return None
    if read_integer(os.environ, "WORLD_SIZE") == 1 or group_size() == 1:
        return None
    name = processes.current_process().name
    return (
        f"multiprocessing started this process ({name}), and this MPI world has 1 rank: each such "
        f"process would train a separate model. {_advice('N')}"
    )


def _advice(ranks: int | str) -> str:
    return (
        f"Start the ranks by `parallel-sgd run -n {ranks}` or torchrun, or initialize "
        "torch.distributed first; Communicator.single() is for a separate model"
    )


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
