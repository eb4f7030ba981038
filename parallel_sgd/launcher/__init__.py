"""`parallel-sgd run`: start a program on N ranks, watch the ranks, and judge the outcome.

A rank imports only what prepares the rank.
"""

from typing import TYPE_CHECKING

from ..lazy import on_first_use

if TYPE_CHECKING:
    from .batch_systems import Allocation, allocation
    from .cleanup import in_use
    from .host_resources import all_cores, usable_cores
    from .hosts import MOST_RANKS, MPICH, OPEN_MPI, Hostfile, read_hostfile
    from .job import JobEnd, run_job
    from .mpiexec import Mpiexec, bound_mpi, choose_mpiexec, find_mpiexecs, identify
    from .options import (
        MPIEXEC,
        TORCHRUN,
        Request,
        add_ranks,
        parse,
        rank_count,
        require_program,
        seconds,
    )
    from .outcome import Ending, JobStatus, Outcome, judge
    from .reachable_hosts import Hosts
    from .restarts import Restarts, job_variables
    from .run import THREAD_VARIABLES, Launch, plan
    from .supervisor import Supervisor, Waits

__all__ = [
    "MOST_RANKS",
    "MPICH",
    "MPIEXEC",
    "OPEN_MPI",
    "THREAD_VARIABLES",
    "TORCHRUN",
    "Allocation",
    "Ending",
    "Hostfile",
    "Hosts",
    "JobEnd",
    "JobStatus",
    "Launch",
    "Mpiexec",
    "Outcome",
    "Request",
    "Restarts",
    "Supervisor",
    "Waits",
    "add_ranks",
    "all_cores",
    "allocation",
    "bound_mpi",
    "choose_mpiexec",
    "find_mpiexecs",
    "identify",
    "in_use",
    "job_variables",
    "judge",
    "parse",
    "plan",
    "rank_count",
    "read_hostfile",
    "require_program",
    "run_job",
    "seconds",
    "usable_cores",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "batch_systems": ("Allocation", "allocation"),
        "cleanup": ("in_use",),
        "host_resources": ("all_cores", "usable_cores"),
        "hosts": ("MOST_RANKS", "MPICH", "OPEN_MPI", "Hostfile", "read_hostfile"),
        "job": ("JobEnd", "run_job"),
        "mpiexec": ("Mpiexec", "bound_mpi", "choose_mpiexec", "find_mpiexecs", "identify"),
        "options": (
            "MPIEXEC",
            "TORCHRUN",
            "Request",
            "add_ranks",
            "parse",
            "rank_count",
            "require_program",
            "seconds",
        ),
        "outcome": ("Ending", "JobStatus", "Outcome", "judge"),
        "reachable_hosts": ("Hosts",),
        "restarts": ("Restarts", "job_variables"),
        "run": ("THREAD_VARIABLES", "Launch", "plan"),
        "supervisor": ("Supervisor", "Waits"),
    },
)
