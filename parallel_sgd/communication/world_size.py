"""Whether a world has all processes that were started to train one model together.

Where a launcher and MPI do not know each other, each process gets a world of one rank, and would
train a model of its own, with exit code 0. So what was started is compared with what MPI has: what
mpiexec or srun says, what the user has asked `parallel-sgd run` for, what torchrun and its like
say, and what PyTorch's process group has. Everything is local.
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
    """What starts processes that find each other without MPI, and the variables that it sets."""

    name: str  #: none where only the variables are known
    size: str
    ranks: tuple[str, ...]  #: one of them is there: else the size is not of a process
    mark: str = ""  #: what nobody else sets; without one the variables may be those of a shell


_STARTERS = (
    _Starter("torchrun", "WORLD_SIZE", ("RANK",), "TORCHELASTIC_RUN_ID"),
    _Starter("horovodrun", "HOROVOD_SIZE", ("HOROVOD_RANK",), "HOROVOD_RANK"),
    _Starter("", "WORLD_SIZE", ("RANK", "LOCAL_RANK")),
)


def require_whole(world_size: int, vendor: str, *, trains: bool = False) -> None:
    """Refuse a world that is not all that was started.

    Args:
        world_size: of MPI.COMM_WORLD, in ranks; 1 where there is no MPI.
        vendor: the MPI that mpi4py is bound to, as `MPI.get_vendor()[0]` says.
        trains: whether a learner is made: then a process of `multiprocessing` is refused, too, if
            it has a world of its own. (One that loads data may execute the program's first lines.)

    Raises:
        UserError: what was started, and what the world has.
    """
    problem = world_mismatch(world_size, vendor) or _group_mismatch(world_size)
    if problem is None and trains and world_size == 1:
        problem = _child_alone()
    if problem is not None:
        raise UserError(problem)


def world_mismatch(
    world_size: int, vendor: str, environ: Mapping[str, str] | None = None
) -> str | None:
    """What is wrong where the MPI world is not the one that the environment tells of.

    Args:
        world_size, vendor: those of `require_whole`.
        environ: this process's own if not given.

    Returns:
        One line for a UserError, or None where all agree (and where nothing is known).
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
            line += ", and the two do not find each other"
        return f"{line}. {_BOTH}"
    requested = read_integer(environ, REQUESTED_RANKS)
    if requested is not None and requested != world_size:
        return f"{_ranks(requested)} were asked for, {has}"
    for starter in _STARTERS:
        size = read_integer(environ, starter.size) or 0
        told = [f"{name}={environ[name]}" for name in starter.ranks if name in environ]
        mark = bool(starter.mark) and starter.mark in environ
        is_this = mark if starter.mark else world_size == 1 and requested is None
        if size > world_size and told and is_this:
            said = f"{starter.size}={size}"
            if starter.name:
                line = (
                    f"{starter.name} started {size} processes ({', '.join([said, *told])}), {has}"
                )
            else:
                line = f"{said} says that {size} processes were started ({', '.join(told)}), {has}"
            line = f"{line}: each would train a model of its own. {_instead(size)}"
            if not mark:
                line += (
                    f". Where this process is the only one: unset {starter.size}, or "
                    "`parallel-sgd run -n 1`"
                )
            return line
    return None


def _group_mismatch(world_size: int) -> str | None:
    """What is wrong where PyTorch's process group has more processes than the MPI world."""
    size = _group_size() or 0
    if size <= world_size:
        return None
    return (
        f"torch.distributed has a process group of {size} processes, but this MPI world has "
        f"{_ranks(world_size)}: each would train a model of its own. {_instead(size)}"
    )


def _group_size() -> int | None:
    """Of PyTorch's process group; None where there is none."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_world_size())


def _child_alone() -> str | None:
    """What is wrong where `multiprocessing` has started this process, and nothing says that it is
    the only one."""
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is None or processes.parent_process() is None or launcher_name() is not None:
        return None
    if read_integer(os.environ, "WORLD_SIZE") == 1 or _group_size() == 1:
        return None
    name = processes.current_process().name
    return (
        f"multiprocessing started this process ({name}), and this MPI world has 1 rank: each such "
        f"process would train a model of its own. {_instead('N')}"
    )


def _instead(ranks: int | str) -> str:
    return (
        f"Start the ranks by `parallel-sgd run -n {ranks}`; Communicator.single() is for a model "
        "apart"
    )


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
