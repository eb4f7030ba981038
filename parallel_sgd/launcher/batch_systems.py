"""Read the allocation of hosts from Slurm, PBS, LSF or Grid Engine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .hosts import decimal


class _BatchSystem(NamedTuple):
    """The names of a batch system's environment variables; "" if there is none."""

    name: str
    shows: str  #: set if hosts are allocated to this process
    hosts: str  #: number of hosts
    slots: str  #: number of ranks on all hosts together
    cores: str = ""  #: number of the job's cores on this host


_BATCH_SYSTEMS = (
    _BatchSystem(
        "Slurm", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_CPUS_ON_NODE"
    ),
    _BatchSystem("PBS", "PBS_NODEFILE", "PBS_NUM_NODES", "PBS_NP"),
    _BatchSystem("LSF", "LSB_JOBID", "", "LSB_DJOB_NUMPROC"),
    _BatchSystem("Grid Engine", "PE_HOSTFILE", "NHOSTS", "NSLOTS"),
)


class Allocation(NamedTuple):
    """The allocation of a batch system to this process. Unknown values are None.

    Attributes:
        name: the batch system. mpiexec finds its hosts by itself.
        hosts: the number of hosts.
        slots: the number of ranks, on all hosts together.
        cores: the number of the job's cores on this host.
    """

    name: str
    hosts: int | None = None
    slots: int | None = None
    cores: int | None = None


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the batch allocation that this process belongs to, or None.

    Local. Reads the file named by PBS, if present.
    """
    system = next((s for s in _BATCH_SYSTEMS if environ.get(s.shows)), None)
    if system is None:
        return None
    hosts, slots, cores = (decimal(environ.get(name, "")) for name in system[2:])
    if system.name == "PBS":  # a line for each slot; OpenPBS has no variable for the number
        with contextlib.suppress(OSError, UnicodeDecodeError):
            lines = Path(environ[system.shows]).read_text().split()
            hosts, slots = len(set(lines)), len(lines)
    return Allocation(system.name, hosts or None, slots or None, cores or None)
