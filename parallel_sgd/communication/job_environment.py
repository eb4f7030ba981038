"""Read the launcher's environment variables: size, rank, name.

Nothing here imports MPI, so all functions also work before MPI is initialized, and if MPI and the
launcher do not match: MPICH's mpiexec under an mpi4py bound to Open MPI starts N worlds of a single
rank, without a message. Everything is local (no communication).

Seen with the wheels: Open MPI 5.0 sets OMPI_COMM_WORLD_{SIZE,RANK,LOCAL_SIZE}; MPICH 5.0 sets
PMI_{SIZE,RANK} and MPI_LOCALNRANKS.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import UserError

#: Set by `parallel-sgd run`: the number of ranks that the user asked for.
REQUESTED_RANKS = "PARALLEL_SGD_RANKS"

#: Set by `parallel-sgd run --with torchrun` in its place: torchrun's ranks have no MPI.
TORCHRUN_RANKS = "PARALLEL_SGD_TORCHRUN_RANKS"

#: Set by `parallel-sgd run --servers N`: number of parameter servers, the last ranks.
SERVERS = "PARALLEL_SGD_SERVERS"

#: Set by programs that start processes separately: "worker" or "server".
ROLE = "PARALLEL_SGD_ROLE"

#: PaddlePaddle's variable for the same, and its values.
PADDLE_ROLE, _PADDLE_ROLES = "TRAINING_ROLE", {"TRAINER": "worker", "PSERVER": "server"}

#: Set by `parallel-sgd run` for the options of the same names: see `launcher.options`.
GPUS_PER_RANK, INTERFACE, LOG_DIR = (
    "PARALLEL_SGD_GPUS_PER_RANK",
    "PARALLEL_SGD_INTERFACE",
    "PARALLEL_SGD_LOG_DIR",
)

#: Set by `parallel-sgd run --wait-timeout-s S`: the default of the longest wait for other ranks.
WAIT_TIMEOUT_S = "PARALLEL_SGD_WAIT_TIMEOUT_S"

#: Set to 1 by `parallel-sgd run` if it writes to a terminal; its ranks write to mpiexec.
TERMINAL = "PARALLEL_SGD_TERMINAL"

#: Set to 1 by `parallel-sgd run --survive`: the remaining ranks continue after a rank failure.
SURVIVE = "PARALLEL_SGD_SURVIVE"

#: Set by `parallel-sgd run --spares N`: number of standby ranks, the last ones of the world.
SPARES = "PARALLEL_SGD_SPARES"

#: Set by `parallel-sgd run`: folder for the status of ranks: see `rank_status`.
FOLDER = "PARALLEL_SGD_FOLDER"

#: Set to 1 by `parallel-sgd run` if it prints the errors of its ranks: see `rank_status`.
ERRORS = "PARALLEL_SGD_ERRORS"

#: Set by each rank for its child processes: see `rank_process`.
RANK_PROCESS = "PARALLEL_SGD_RANK_PROCESS"

#: Set by `parallel-sgd run --restarts` and `--requeue`: the job's name, the same for every restart,
#: and the number of restarts.
JOB, RESTART = "PARALLEL_SGD_JOB", "PARALLEL_SGD_RESTART"

#: Set by `parallel-sgd run` for the options of the same names: see `preemption`.
PREEMPT_ON, REQUEUE = "PARALLEL_SGD_PREEMPT_ON", "PARALLEL_SGD_REQUEUE"

EAGER_BYTES = 320 << 10
"""Eager limit for Open MPI, in bytes: larger than a piece of an exchange. Open MPI sends longer
messages over TCP one at a time, in one direction at a time: between two hosts at half the rate of
the link (docs/experiments.md)."""

#: Variables of torchrun that tell a rank, and a job started anew, from others.
TORCH_JOB = ("RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")

#: MPI libraries that share MPICH's way of starting (Hydra, PMI).
_MPICH_FAMILY = ("mpich", "intel", "mvapich", "cray")

#: First number of Slurm's own steps (batch script, interactive shell), not started by srun.
_SLURM_OWN_STEPS = 0xFFFFFFF0


class _Launcher(NamedTuple):
    """Names of one launcher's environment variables."""

    name: str
    size: tuple[str, ...]
    rank: str
    local_size: str = ""
    local_rank: str = ""


def _names_from(name: str, prefix: str) -> _Launcher:
    """Return a launcher whose variables share a prefix."""
    size, rank, *local = (f"{prefix}_{n}" for n in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK"))
    return _Launcher(name, (size,), rank, *local)


_SRUN_LOCAL = "SLURM_LOCALID"

# Innermost launcher first: Open MPI and MPICH start their daemons by srun, so Slurm's variables are
# set, too, and count the daemons.
_LAUNCHERS = (
    _names_from("Open MPI's mpiexec", "OMPI_COMM_WORLD"),
    _names_from("MVAPICH's mpiexec", "MV2_COMM_WORLD"),
    _Launcher("MPICH's mpiexec", ("PMI_SIZE",), "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    _names_from("jsrun", "JSM_NAMESPACE"),
    _Launcher("flux run", ("FLUX_JOB_SIZE",), "FLUX_TASK_RANK", "", "FLUX_TASK_LOCAL_ID"),
    _Launcher("parallel-sgd run", (TORCHRUN_RANKS,), "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    _Launcher("srun", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_PROCID", "", _SRUN_LOCAL),
    _Launcher("parallel-sgd run", (REQUESTED_RANKS,), "PMIX_RANK"),
)

_LAUNCHER_PREFIXES = (
    "FLUX_",
    "HYDI_",
    "HYDRA_",
    "JSM_",
    "MV2_",
    "OMPI_",
    "PMIX_",
    "PMI_",
    "PRTE_",
    "SLURM_",
)
_LAUNCHER_NAMES = (
    *("MPI_LOCALNRANKS", "MPI_LOCALRANKID", REQUESTED_RANKS, TORCHRUN_RANKS),
    *(SERVERS, SURVIVE, SPARES, FOLDER),
    *(ERRORS, ROLE, GPUS_PER_RANK, INTERFACE, LOG_DIR, TERMINAL, WAIT_TIMEOUT_S),
    *(JOB, RESTART, PREEMPT_ON, REQUEUE, RANK_PROCESS),
)


def output_is_terminal() -> bool:
    """Return True if this process's standard output and error are terminals. Local."""
    try:
        return sys.stdout.isatty() and sys.stderr.isatty()
    except (AttributeError, ValueError):  # missing or closed
        return False


def launched_size(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the number of ranks started by the launcher; None for plain `python`.

    Args:
        environ: environment variables; by default this process's.
    """
    launcher, environ = _launcher(environ)
    return read_integer(environ, *launcher.size) if launcher else None


def launched_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """Return this process's rank from its launcher; None if unknown."""
    launcher, environ = _launcher(environ)
    if launcher is None:
        return read_integer(environ, "PMIX_RANK")
    return read_integer(environ, launcher.rank)


def launched_local_size(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the launcher's number of ranks on this node; None if unknown."""
    launcher, environ = _launcher(environ)
    return read_integer(environ, launcher.local_size) if launcher else None


def launched_local_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """Return this process's number among the ranks on its node; None if unknown.

    mpiexec's ranks in a Slurm batch job inherit a SLURM_LOCALID that is not their own.
    """
    launcher, environ = _launcher(environ)
    if launcher is None:
        return None
    if launcher_name(environ) == "srun":  # srun may set PMI_SIZE, too
        return read_integer(environ, _SRUN_LOCAL)
    return read_integer(environ, launcher.local_rank)


def launcher_name(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the launcher's name in words ("Open MPI's mpiexec"); None for plain `python`."""
    launcher, environ = _launcher(environ)
    if launcher is None:
        return "a PMIx launcher" if "PMIX_RANK" in environ else None
    if launcher.size == ("PMI_SIZE",) and not is_hydra(environ):
        return "srun" if _inside_srun(environ) else "a PMI launcher"
    return launcher.name


def is_hydra(environ: Mapping[str, str]) -> bool:
    """Return True if MPICH's mpiexec started this process. srun may set only PMI_SIZE."""
    return "PMI_SIZE" in environ and "MPI_LOCALNRANKS" in environ


def job_name(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the name of a restartable job, the same for every restart; None otherwise.

    Without a name from our launcher, a job requeued by Slurm has Slurm's number.
    """
    environ = os.environ if environ is None else environ
    number = environ.get("SLURM_JOB_ID") if environ.get(REQUEUE) == "1" else None
    return environ.get(JOB) or (f"slurm-{number}" if number else None)


def restarts(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of restarts of this job; 0 if unknown."""
    environ = os.environ if environ is None else environ
    count = read_integer(environ, RESTART)
    if count is None and environ.get(REQUEUE) == "1":
        count = read_integer(environ, "SLURM_RESTART_COUNT")
    return count or 0


def requested_servers(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the requested number of parameter servers: the last ranks of the world.

    Returns:
        The number (0: every rank serves a part in addition to training); None if not set.

    Raises:
        UserError: the value is not a whole number, at least 0.
    """
    environ = os.environ if environ is None else environ
    if SERVERS not in environ:
        return None
    servers = read_integer(environ, SERVERS)
    if servers is None:
        raise UserError(f"{SERVERS}={environ[SERVERS]!r} must be a whole number, at least 0")
    return servers


def requested_role(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the requested role of this process.

    Read from PARALLEL_SGD_ROLE, or from PaddlePaddle's TRAINING_ROLE.

    Returns:
        "worker" or "server"; None if not set.

    Raises:
        UserError: the value is neither, or the two variables differ.
    """
    environ = os.environ if environ is None else environ
    said = {}
    for name, roles in ((ROLE, {"worker": "worker", "server": "server"}),
                        (PADDLE_ROLE, _PADDLE_ROLES)):  # fmt: skip
        value = environ.get(name)
        if value is None:
            continue
        if value not in roles:
            raise UserError(f"{name}={value!r} must be one of {', '.join(roles)}")
        said[name] = roles[value]
    if len(set(said.values())) > 1:
        raise UserError(
            f"{ROLE}={environ[ROLE]!r} contradicts {PADDLE_ROLE}={environ[PADDLE_ROLE]!r}: set "
            "only one of them"
        )
    return next(iter(said.values()), None)


def fault_tolerant(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if training continues after rank failures: `parallel-sgd run --survive`."""
    return (os.environ if environ is None else environ).get(SURVIVE) == "1"


def requested_spares(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of standby ranks, the last of the world: `parallel-sgd run --spares`."""
    return read_integer(os.environ if environ is None else environ, SPARES) or 0


def torch_ranks(environ: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Return this rank and the number of ranks of torchrun or a similar launcher.

    Such launchers (Lightning, Accelerate, Ray) set RANK, WORLD_SIZE and the address MASTER_ADDR.

    Returns:
        None if a variable is missing, or for a single rank.
    """
    environ = os.environ if environ is None else environ
    rank, size = read_integer(environ, "RANK"), read_integer(environ, "WORLD_SIZE")
    if rank is None or size is None or size == 1 or not environ.get("MASTER_ADDR"):
        return None
    return rank, size


def same_mpi_family(one: str, other: str) -> bool:
    """Return True if two MPI vendors start each other's programs.

    Args:
        one, other: vendors, such as "Open MPI", "MPICH", "Intel MPI".
    """
    one, other = one.lower(), other.lower()
    if one.startswith(_MPICH_FAMILY):
        return other.startswith(_MPICH_FAMILY)
    return one == other


def launcher_supports(launcher: str, vendor: str) -> bool:
    """Return True if a launcher can start ranks of this MPI; srun and similar start any MPI."""
    owner, mpiexec, _ = launcher.partition("'s mpiexec")
    return not mpiexec or same_mpi_family(owner, vendor)


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy an environment without the launcher's variables, for an independent process."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in _LAUNCHER_NAMES
    }


def _launcher(environ: Mapping[str, str] | None) -> tuple[_Launcher | None, Mapping[str, str]]:
    """Return the innermost launcher found in the environment, and the environment used."""
    environ = os.environ if environ is None else environ
    for launcher in _LAUNCHERS:
        if launcher.name == "srun" and not _inside_srun(environ):
            continue
        if read_integer(environ, *launcher.size) is not None:
            return launcher, environ
    return None, environ


def srun_step(environ: Mapping[str, str] | None = None) -> str | None:
    """Return this process's Slurm job step, in the form for `scancel`; None without srun. Local."""
    environ = os.environ if environ is None else environ
    job = read_integer(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    if launcher_name(environ) != "srun" or job is None:
        return None
    return f"{job}.{read_integer(environ, 'SLURM_STEP_ID', 'SLURM_STEPID')}"


def _inside_srun(environ: Mapping[str, str]) -> bool:
    """Return True if srun started this process.

    salloc and sbatch set SLURM_NTASKS, but no such step.
    """
    step = read_integer(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    return step is not None and step < _SLURM_OWN_STEPS and "SLURM_PROCID" in environ


def read_integer(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables with a whole number, at least 0, or None."""
    for name in names:
        value = environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None


def raise_eager_limit() -> None:
    """Let Open MPI send messages of up to `EAGER_BYTES` over TCP without a handshake. Local.

    Call before MPI is initialized. A value in the environment has precedence (mpiexec's --mca sets
    one; a parameter file does not count). Ignored by other MPIs.
    """
    os.environ.setdefault("OMPI_MCA_btl_tcp_eager_limit", str(EAGER_BYTES))
