"""Make the world of a process: all ranks started by mpiexec, or a single rank."""

from __future__ import annotations

import warnings

from ..errors import UserError
from .communicator import Communicator
from .job_environment import fault_tolerant, launched_size, launcher_name
from .threads.communicator import ThreadWorld
from .world_size import require_whole

__all__ = ["Communicator", "single", "world"]


def world(timeout_s: float, cuda_aware: bool) -> Communicator:
    """Make the world: see `Communicator.world`. MPI is imported only here."""
    try:
        from .mpi.communicator import mpi_world
    except (ImportError, RuntimeError) as error:
        launched = launched_size() or 1
        if launched > 1:
            raise UserError(
                f"{launcher_name()} started {launched} ranks, but mpi4py finds no MPI "
                "library: install one beside it (pip install '.[mpich]' from the checkout)"
            ) from error
        require_whole(1, "no MPI library")
        warnings.warn(
            "mpi4py finds no MPI library (pip install '.[mpich]' from the checkout): training on "
            "one rank",
            stacklevel=3,
        )
        return single()
    if fault_tolerant():
        from .elastic.ulfm import ulfm_world

        return ulfm_world(timeout_s=timeout_s, cuda_aware=cuda_aware)
    return mpi_world(timeout_s=timeout_s, cuda_aware=cuda_aware)


def single() -> Communicator:
    """Make a world of a single rank: see `Communicator.single`."""
    return ThreadWorld(1).communicator(0)


Communicator._make_world, Communicator._make_single = world, single
