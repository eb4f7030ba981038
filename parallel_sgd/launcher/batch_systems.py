"""Batch systems: what Slurm, PBS, LSF and Grid Engine say of the hosts that they have given."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .hosts import decimal


class _BatchSystem(NamedTuple):
    """The names of one batch system's environment variables; none where it has none for it."""

    name: str
    shows: str  #: that it has given hosts to this process
    hosts: str  #: how many
    slots: str  #: on how many ranks of all of them together it counts
    cores: str = ""  #: of this host, how many are the job's


_BATCH_SYSTEMS = (
    _BatchSystem(
        "Slurm", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_CPUS_ON_NODE"
    ),
    _BatchSystem("PBS", "PBS_NODEFILE", "PBS_NUM_NODES", "PBS_NP"),
    _BatchSystem("LSF", "LSB_JOBID", "", "LSB_DJOB_NUMPROC"),
    _BatchSystem("Grid Engine", "PE_HOSTFILE", "NHOSTS", "NSLOTS"),
)


class Allocation(NamedTuple):
    """What a batch system has given to this process; None where it does not say.

    Attributes:
        name: of the batch system, whose hosts mpiexec finds by itself.
        hosts: how many.
        slots: ranks on all hosts.
        cores: of this host.
    """

    name: str
    hosts: int | None = None
    slots: int | None = None
    cores: int | None = None


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """What the batch system has given of which this process is part; None where it is part of none.

    Local. Reads the file that PBS names, where it is there.
    """
    system = next((s for s in _BATCH_SYSTEMS if environ.get(s.shows)), None)
    if system is None:
        return None
    hosts, slots, cores = (decimal(environ.get(name, "")) for name in system[2:])
    if system.name == "PBS":  # a line for each slot; OpenPBS has no other way to say it
        with contextlib.suppress(OSError, UnicodeDecodeError):
            lines = Path(environ[system.shows]).read_text().split()
            hosts, slots = len(set(lines)), len(lines)
    return Allocation(system.name, hosts or None, slots or None, cores or None)
