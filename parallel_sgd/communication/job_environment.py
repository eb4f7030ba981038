"""What the launcher that started this process says in its environment: size, rank, name.

Nothing here imports MPI, so it also works before MPI is up, and where MPI and the launcher do not
know each other: MPICH's mpiexec under an mpi4py bound to Open MPI starts N worlds of one rank each,
and says nothing. Everything is local (no communication).

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

#: Set by `parallel-sgd run --servers N`: how many of the ranks, the last ones, serve parameters.
SERVERS = "PARALLEL_SGD_SERVERS"

#: Set by whoever starts processes apart: whether this one is a "worker" or a "server".
ROLE = "PARALLEL_SGD_ROLE"

#: What PaddlePaddle's users set for the same, and its values.
PADDLE_ROLE, _PADDLE_ROLES = "TRAINING_ROLE", {"TRAINER": "worker", "PSERVER": "server"}

#: Set by `parallel-sgd run` for the options of the same names: see `command_line.surroundings`.
GPUS_PER_RANK, INTERFACE, LOG_DIR = (
    "PARALLEL_SGD_GPUS_PER_RANK",
    "PARALLEL_SGD_INTERFACE",
    "PARALLEL_SGD_LOG_DIR",
)

#: Set by `parallel-sgd run --wait-timeout-s S`: the longest wait of a rank for others, where its
#: program does not say.
WAIT_TIMEOUT_S = "PARALLEL_SGD_WAIT_TIMEOUT_S"

#: Set to 1 by `parallel-sgd run` where it writes to a terminal itself: its ranks write to mpiexec.
TERMINAL = "PARALLEL_SGD_TERMINAL"

#: Set to 1 by `parallel-sgd run --survive`: MPI lets the others go on where a rank has died.
SURVIVE = "PARALLEL_SGD_SURVIVE"

#: Set by `parallel-sgd run --spares N`: how many of the ranks, the last ones, wait in reserve.
SPARES = "PARALLEL_SGD_SPARES"

#: Set by `parallel-sgd run`: where ranks on its host sign on and off.
FOLDER = "PARALLEL_SGD_FOLDER"

#: Set to 1 by `parallel-sgd run` where it prints the errors of its ranks: see `attendance`.
ERRORS = "PARALLEL_SGD_ERRORS"

#: Set by each rank for the processes that it starts: see `rank_process`.
RANK_PROCESS = "PARALLEL_SGD_RANK_PROCESS"

#: Set by `parallel-sgd run --restarts` and `--requeue`: a name of this job, the same each time that
#: it is started, and how often it has been started again.
JOB, RESTART = "PARALLEL_SGD_JOB", "PARALLEL_SGD_RESTART"

#: Set by `parallel-sgd run` for the options of the same names: see `preemption`.
PREEMPT_ON, REQUEUE = "PARALLEL_SGD_PREEMPT_ON", "PARALLEL_SGD_REQUEUE"

EAGER_BYTES = 320 << 10
"""More than a piece of an exchange. Of longer messages over TCP Open MPI sends one at a time, in
one direction at a time: between two hosts at half the rate of the link (docs/experiments.md)."""

#: MPI libraries that share MPICH's way of starting (Hydra, PMI).
_MPICH_FAMILY = ("mpich", "intel", "mvapich", "cray")

#: From here Slurm numbers its own steps (batch script, interactive shell): not started by srun.
_SLURM_OWN_STEPS = 0xFFFFFFF0


class _Launcher(NamedTuple):
    """The names of one launcher's environment variables."""

    name: str
    size: tuple[str, ...]
    rank: str
    local_size: str = ""
    local_rank: str = ""


def _names_from(name: str, prefix: str) -> _Launcher:
    """A launcher whose variables are named alike."""
    size, rank, *local = (f"{prefix}_{n}" for n in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK"))
    return _Launcher(name, (size,), rank, *local)


_SRUN_LOCAL = "SLURM_LOCALID"

# The innermost launcher first: Open MPI and MPICH start their daemons through srun, so Slurm's
# variables are there too, and count the daemons.
_LAUNCHERS = (
    _names_from("Open MPI's mpiexec", "OMPI_COMM_WORLD"),
    _names_from("MVAPICH's mpiexec", "MV2_COMM_WORLD"),
    _Launcher("MPICH's mpiexec", ("PMI_SIZE",), "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    _names_from("jsrun", "JSM_NAMESPACE"),
    _Launcher("flux run", ("FLUX_JOB_SIZE",), "FLUX_TASK_RANK", "", "FLUX_TASK_LOCAL_ID"),
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
    *("MPI_LOCALNRANKS", "MPI_LOCALRANKID", REQUESTED_RANKS, SERVERS, SURVIVE, SPARES, FOLDER),
    *(ERRORS, ROLE, GPUS_PER_RANK, INTERFACE, LOG_DIR, TERMINAL, WAIT_TIMEOUT_S),
    *(JOB, RESTART, PREEMPT_ON, REQUEUE, RANK_PROCESS),
)


def output_is_terminal() -> bool:
    """Whether this process's standard output and error are terminals. Local."""
    try:
        return sys.stdout.isatty() and sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def launched_size(environ: Mapping[str, str] | None = None) -> int | None:
    """How many ranks the launcher that started this process says there are.

    Returns:
        The number of ranks; None where no launcher started this process (plain `python`).
    """
    launcher, environ = _launcher(environ)
    return read_integer(environ, *launcher.size) if launcher else None


def launched_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """This process's rank according to its launcher; None where none started it or none says."""
    launcher, environ = _launcher(environ)
    if launcher is None:
        return read_integer(environ, "PMIX_RANK")
    return read_integer(environ, launcher.rank)


def launched_local_size(environ: Mapping[str, str] | None = None) -> int | None:
    """How many of the ranks are on this node according to the launcher; None where unknown."""
    launcher, environ = _launcher(environ)
    return read_integer(environ, launcher.local_size) if launcher else None


def launched_local_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """This process's number among the ranks on its node according to the launcher; None where no
    launcher says it. mpiexec's ranks in a batch job of Slurm inherit a SLURM_LOCALID that is not
    theirs."""
    launcher, environ = _launcher(environ)
    if launcher is None:
        return None
    if launcher_name(environ) == "srun":  # which may also have set PMI_SIZE
        return read_integer(environ, _SRUN_LOCAL)
    return read_integer(environ, launcher.local_rank)


def launcher_name(environ: Mapping[str, str] | None = None) -> str | None:
    """What started this process, in words ("Open MPI's mpiexec"); None for plain `python`."""
    launcher, environ = _launcher(environ)
    if launcher is None:
        return "a PMIx launcher" if "PMIX_RANK" in environ else None
    if launcher.size == ("PMI_SIZE",) and not is_hydra(environ):
        return "srun" if _inside_srun(environ) else "a PMI launcher"
    return launcher.name


def is_hydra(environ: Mapping[str, str]) -> bool:
    """Whether MPICH's mpiexec started this process: srun too may set PMI_SIZE, but not the rest."""
    return "PMI_SIZE" in environ and "MPI_LOCALNRANKS" in environ


def job_name(environ: Mapping[str, str] | None = None) -> str | None:
    """Of a job that is started again where it is lost: the same each time; None: it is not. Where
    no launcher of ours has said it, a job that Slurm requeues has Slurm's number."""
    environ = os.environ if environ is None else environ
    number = environ.get("SLURM_JOB_ID") if environ.get(REQUEUE) == "1" else None
    return environ.get(JOB) or (f"slurm-{number}" if number else None)


def restarts(environ: Mapping[str, str] | None = None) -> int:
    """How often this job has been started again; 0 where nobody says."""
    environ = os.environ if environ is None else environ
    count = read_integer(environ, RESTART)
    if count is None and environ.get(REQUEUE) == "1":
        count = read_integer(environ, "SLURM_RESTART_COUNT")
    return count or 0


def requested_servers(environ: Mapping[str, str] | None = None) -> int | None:
    """How many ranks the user wants as parameter servers: the last ones of the world.

    Returns:
        The number (0: every rank serves a part beside training); None where nothing is said.

    Raises:
        UserError: what is said is not a whole number, at least 0.
    """
    environ = os.environ if environ is None else environ
    if SERVERS not in environ:
        return None
    servers = read_integer(environ, SERVERS)
    if servers is None:
        raise UserError(f"{SERVERS}={environ[SERVERS]!r} must be a whole number, at least 0")
    return servers


def requested_role(environ: Mapping[str, str] | None = None) -> str | None:
    """What this process is to be, where whoever started it has said so: PARALLEL_SGD_ROLE, or as
    PaddlePaddle's users say it, TRAINING_ROLE.

    Returns:
        "worker" or "server"; None where nothing is said.

    Raises:
        UserError: what is said is neither, or the two contradict each other.
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
            f"{ROLE}={environ[ROLE]!r} contradicts {PADDLE_ROLE}={environ[PADDLE_ROLE]!r}: one of "
            "them is enough"
        )
    return next(iter(said.values()), None)


def fault_tolerant(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ranks shall go on where another has died: `parallel-sgd run --survive`."""
    return (os.environ if environ is None else environ).get(SURVIVE) == "1"


def requested_spares(environ: Mapping[str, str] | None = None) -> int:
    """How many ranks wait in reserve, the last ones of the world: `parallel-sgd run --spares`."""
    return read_integer(os.environ if environ is None else environ, SPARES) or 0


def same_mpi_family(one: str, other: str) -> bool:
    """Whether two vendors ("Open MPI", "MPICH", "Intel MPI", …) start each other's programs."""
    one, other = one.lower(), other.lower()
    if one.startswith(_MPICH_FAMILY):
        return other.startswith(_MPICH_FAMILY)
    return one == other


def launcher_supports(launcher: str, vendor: str) -> bool:
    """Whether a launcher, by its name, can start ranks of this MPI; srun and the like start any."""
    owner, mpiexec, _ = launcher.partition("'s mpiexec")
    return not mpiexec or same_mpi_family(owner, vendor)


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of an environment without the launcher's traces, for a process of its own."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in _LAUNCHER_NAMES
    }


def _launcher(environ: Mapping[str, str] | None) -> tuple[_Launcher | None, Mapping[str, str]]:
    """The innermost launcher that left its variables, and the environment that was read."""
    environ = os.environ if environ is None else environ
    for launcher in _LAUNCHERS:
        if launcher.name == "srun" and not _inside_srun(environ):
            continue
        if read_integer(environ, *launcher.size) is not None:
            return launcher, environ
    return None, environ


def srun_step(environ: Mapping[str, str] | None = None) -> str | None:
    """The job step whose task this process is, as `scancel` takes it; None where srun has not
    started it. Local."""
    environ = os.environ if environ is None else environ
    job = read_integer(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    if launcher_name(environ) != "srun" or job is None:
        return None
    return f"{job}.{read_integer(environ, 'SLURM_STEP_ID', 'SLURM_STEPID')}"


def _inside_srun(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process: salloc and sbatch set SLURM_NTASKS, but no such step."""
    step = read_integer(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    return step is not None and step < _SLURM_OWN_STEPS and "SLURM_PROCID" in environ


def read_integer(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that holds a whole number, at least 0."""
    for name in names:
        value = environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None


def raise_eager_limit() -> None:
    """Let Open MPI send messages of up to `EAGER_BYTES` over TCP without asking the receiver first,
    where the environment says nothing else (mpiexec's --mca does; a file of parameters does not
    count). Before MPI is up; other MPIs do not look at it. Local."""
    os.environ.setdefault("OMPI_MCA_btl_tcp_eager_limit", str(EAGER_BYTES))
