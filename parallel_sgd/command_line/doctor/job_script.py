"""Write a job script for the ranks checked by the doctor: `parallel-sgd doctor --job FILE`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...communication.job_environment import GPUS_PER_RANK, INTERFACE, WAIT_TIMEOUT_S
from ...errors import UserError
from ...files import opened, require_place, require_writable, write_whole
from ...launcher import THREAD_VARIABLES
from ...validation import shown

DEFAULT_COMMAND = ("train.py", "config.toml")
SLURM = "Slurm"  #: as the name of an allocation

_MARK = "# Written by parallel-sgd doctor"
_EXEC = "# By exec, signals to this script reach parallel-sgd; the exit code is the job's."

#: Variables that change how ranks start and communicate: names, and beginnings of names.
_VARIABLES = {
    *THREAD_VARIABLES,
    *(GPUS_PER_RANK, INTERFACE, WAIT_TIMEOUT_S, "PATH", "PYTHONPATH", "LD_LIBRARY_PATH"),
}
_FAMILIES = re.compile(
    r"(FI|UCX|GLOO|NCCL|OMPI_MCA|PRTE_MCA|PMIX_MCA|HYDRA|MPICH|MPIR_CVAR|I_MPI|MPI4PY)_[A-Za-z0-9_]+"
)

#: Options of sbatch, with the variables of an allocation that has them.
_OF_SBATCH = {
    "--cpus-per-task": "SLURM_CPUS_PER_TASK",
    "--partition": "SLURM_JOB_PARTITION",
    "--account": "SLURM_JOB_ACCOUNT",
    "--qos": "SLURM_JOB_QOS",
    "--gpus-per-node": "SLURM_GPUS_PER_NODE",
    "--gpus-per-task": "SLURM_GPUS_PER_TASK",
    "--mem": "SLURM_MEM_PER_NODE",  # megabytes, as these two options take them
    "--mem-per-cpu": "SLURM_MEM_PER_CPU",
}


@dataclass(frozen=True)
class JobScript:
    """A job script: it starts the ranks as the doctor did, with another program.

    Attributes:
        command: the program with its arguments, as for `parallel-sgd run`.
        options: of `parallel-sgd run`, as the doctor gave them, without -n.
        ranks_of_hosts: the number of ranks on each host.
        batch: the batch system of the hosts, or None.
        environ: the environment of the doctor.
        folder: the working directory of the doctor.
    """

    command: Sequence[str]
    options: Sequence[str]
    ranks_of_hosts: Sequence[int]
    batch: str | None
    environ: Mapping[str, str]
    folder: str

    @property
    def ranks(self) -> int:
        return sum(self.ranks_of_hosts)

    @property
    def start(self) -> str:
        """The number of ranks and hosts, in words."""
        hosts = len(self.ranks_of_hosts)
        return f"{self.ranks} rank{'s' * (self.ranks > 1)} on {hosts} host{'s' * (hosts > 1)}"

    def text(self) -> str:
        """Return the script."""
        lines = ["#!/bin/bash", f"{_MARK}, which started {self.start} like this.", *self._job()]
        lines += [
            *("", "set -euo pipefail", ""),
            "# The folder of the program, which has the same path on all hosts.",
            f"cd {shlex.quote(self.folder)}",
        ]
        if variables := self._variables():
            lines += ["", "# Variables that were set when the doctor started the ranks."]
            lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        options = ["-n", str(self.ranks), *self.options]
        lines += ["", _EXEC]
        if self.batch == SLURM:
            options = [*self.options, "--log-dir", "logs"]
            lines.append("# Each task of Slurm is a rank. logs/rank-*.out have the output of each.")
        lines.append(f"exec {shlex.join([*_program(), 'run', *options])} \\")
        lines.append(f"    {shlex.join(self.command)}")
        return "\n".join(lines) + "\n"

    def _job(self) -> list[str]:
        """Return the lines for a batch system."""
        if self.batch is None:
            return []
        if self.batch != SLURM:
            return [f"# Submit it to {self.batch}, for {self.start}."]
        tasks = set(self.ranks_of_hosts)
        per_node, alike = max(tasks), len(tasks) == 1
        given = [("--nodes", str(len(self.ranks_of_hosts)))]
        given += [("--ntasks-per-node", str(per_node)) if alike else ("--ntasks", str(self.ranks))]
        given += [(flag, self.environ.get(name, "")) for flag, name in _OF_SBATCH.items()]
        lines = [
            f"#SBATCH {flag}={value}" for flag, value in given if re.fullmatch(r"[\w.,:-]+", value)
        ]
        return [*lines, "# For a limit of time and for requeueing see docs/restarts.md."]

    def _variables(self) -> dict[str, str]:
        return {
            name: value
            for name, value in sorted(self.environ.items())
            if name in _VARIABLES or _FAMILIES.fullmatch(name)
        }

    def write(self, path: str) -> None:
        """Write the script as an executable file.

        Raises:
            UserError: writing fails.
        """
        content = os.fsencode(self.text())

        def write(aside: Path) -> None:
            aside.write_bytes(content)
            if aside.is_file():
                mode = aside.stat().st_mode
                aside.chmod(mode | (mode & 0o444) >> 2)  # for all that may read it

        write_whole("--job", path, write)


def require_job_place(path: str) -> None:
    """Check the place for a job script. Called before any rank is started.

    Raises:
        UserError: no file can be written there, or another file than a job script is there.
    """
    require_place("--job", path)
    if os.path.isfile(path):
        with opened(f"--job={path}", path) as file:
            if _MARK.encode() not in file.read(200):
                raise UserError(
                    f"--job={shown(path)} must be a new file, or a script that the doctor has "
                    "written: this file is another one"
                )
    if os.path.isfile(path) or not os.path.exists(path):
        require_writable("--job", Path(path))


def ranks_of_hosts(hosts: Sequence[str]) -> list[int]:
    """Return the number of ranks on each host.

    Args:
        hosts: the host of each rank.
    """
    return list(Counter(hosts).values())


def _program() -> list[str]:
    """Return the command parallel-sgd of this process's environment."""
    beside = Path(sys.executable).with_name("parallel-sgd")
    if os.access(beside, os.X_OK):
        return [str(beside)]
    return [sys.executable, "-m", "parallel_sgd"]
