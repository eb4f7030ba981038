"""Start a script on N ranks: `parallel-sgd run`.

Choose the mpiexec of the MPI that mpi4py is bound to, add the options needed on this machine (root,
more ranks than cores, the hostfile in mpiexec's dialect), share the cores among the ranks, print
the command, and run it. Under Slurm, PBS, LSF or Grid Engine the batch system chooses hosts and
placement. `--with torchrun` starts ranks without MPI: see `torchrun`.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..communication.entry_point import abort_on_error
from ..communication.job_environment import (
    FOLDER,
    GPUS_PER_RANK,
    INTERFACE,
    JOB,
    LOG_DIR,
    PREEMPT_ON,
    REQUESTED_RANKS,
    REQUEUE,
    RESTART,
    ROLE,
    SERVERS,
    SPARES,
    SURVIVE,
    TERMINAL,
    TORCHRUN_RANKS,
    WAIT_TIMEOUT_S,
    launched_rank,
    launched_size,
    launcher_name,
    output_is_terminal,
)
from ..communication.liveness.rank_process import parent_has_world, parent_rank_process
from ..communication.network_interfaces import interfaces
from ..errors import UserError
from .batch_systems import Allocation, allocation
from .failure_policy import failure_policy
from .host_resources import local_interface, usable_cores
from .hosts import MPICH, OPEN_MPI, Hostfile
from .job import NOTICE_SIGNAL
from .mpiexec import Mpiexec, bound_mpi, choose_mpiexec
from .options import TORCHRUN, Request, parse
from .rank import main as run_as_rank
from .reachable_hosts import Hosts
from .restarts import Restarts, job_variables
from .torchrun import require_torchrun, torchrun_command

#: The number of threads that a library starts in a rank, for each library, unless set by the user.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)

#: The user's variables that Open MPI exports to ranks on other hosts.
_EXPORTED = (
    *(SERVERS, SURVIVE, SPARES, ROLE, GPUS_PER_RANK, INTERFACE, LOG_DIR, WAIT_TIMEOUT_S),
    *(PREEMPT_ON, REQUEUE, JOB, RESTART),
    "PYTHONPATH",
)


@dataclass(frozen=True)
class Launch:
    """A command to run, with the variables to add to its environment."""

    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """Return the launch as a line for a shell."""
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*assignments, shlex.join(self.command)])


def main(argv: Sequence[str]) -> int:
    """Run `parallel-sgd run`, and return the job's exit code.

    Started by a launcher and without -n, this process is a rank: run the script, and return 0.

    Raises:
        UserError: the job cannot be started.
    """
    name = launcher_name()
    rank = parent_rank_process()
    if name is not None and rank is not None and ((launched_size() or 1) > 1 or parent_has_world()):
        raise UserError(
            f"run must not be started by a rank: process {rank} is rank {launched_rank()} of "
            f"{launched_size()}, started by {name}, whose MPI would take the new ranks for its "
            "own. Start it when that job has ended"
        )
    with contextlib.nullcontext() if name is None else abort_on_error():
        request = parse(argv)
    if request.ranks is None:
        os.environ.update({**request.for_ranks, **job_variables(request, os.environ)})
        run_as_rank(request.command)
        return 0
    if name is not None:
        raise UserError(
            f"run -n {request.ranks} must not be started by a launcher: this is already rank "
            f"{launched_rank()} of {launched_size()}, started by {name}. There, leave -n away: "
            f"parallel-sgd run {shlex.join(request.command)}"
        )
    mpiexec = None if request.launcher == TORCHRUN else _mpiexec(request)
    terminal = {TERMINAL: "1"} if output_is_terminal() and request.log_dir is None else {}
    environ = {**_home_variable(), **os.environ, **terminal, **job_variables(request, os.environ)}
    batch = None if request.hostfile else allocation(environ)
    vendor = None if mpiexec is None else mpiexec.vendor
    hosts = Hosts(request.hostfile, batch, vendor, request.mpiexec_options, environ)
    if mpiexec is None:
        require_torchrun(request, hosts)
    cores, root = usable_cores(), os.geteuid() == 0

    def launch(chosen: Request) -> Launch:
        if mpiexec is None:
            return plan_torchrun(chosen, environ, cores=cores)
        return plan(chosen, mpiexec, environ, cores=cores, root=root)

    return Restarts(request, launch, hosts, environ).run()


def _mpiexec(request: Request) -> Mpiexec:
    """Return the mpiexec of the MPI that mpi4py is bound to.

    Raises:
        UserError: there is no MPI, or no mpiexec of it.
    """
    try:
        vendor = bound_mpi()["vendor"]
    except UserError as error:
        command = shlex.join(["parallel-sgd", "run", "--with", TORCHRUN, "-n", str(request.ranks)])
        raise UserError(
            f"{error}. PyTorch's launcher needs no MPI: {command} {shlex.join(request.command)}"
        ) from None
    return choose_mpiexec(vendor, request.mpiexec)


def _home_variable() -> dict[str, str]:
    """Return HOME, for an environment without it: Open MPI does not start without HOME.

    If the user has no home folder, use a path at which nobody can put settings or modules for this
    user.
    """
    home = os.path.expanduser("~")
    return {"HOME": home if os.path.isabs(home) else os.devnull}


def plan(
    request: Request, mpiexec: Mpiexec, environ: Mapping[str, str], *, cores: int, root: bool
) -> Launch:
    """Return the command and environment for a request. Read nothing but the arguments.

    Args:
        request: the user's request.
        mpiexec: the mpiexec to use.
        environ: the user's environment; variables set there stay.
        cores: the number of cores usable by this process; other hosts are assumed to have as many.
        root: True if this process runs as root.

    Raises:
        UserError: this mpiexec cannot take the hostfile, or cannot do what is requested.
    """
    assert request.ranks is not None
    open_mpi = mpiexec.vendor == OPEN_MPI
    batch = None if request.hostfile else allocation(environ)
    if batch is not None and batch.cores is not None:
        cores = min(cores, batch.cores)
    ranks_per_host = _most_ranks_on_a_host(request.ranks, request.hostfile, batch, open_mpi, cores)
    added = _thread_variables(environ, max(1, cores // ranks_per_host))
    added[REQUESTED_RANKS] = str(request.ranks)
    added |= request.for_ranks | job_variables(request, environ)
    if request.preempt_on:  # and the signal forwarded by mpiexec
        added[PREEMPT_ON] = f"{request.preempt_on},{NOTICE_SIGNAL.name}"
    policy, given = failure_policy(request), " ".join(request.mpiexec_options)
    policy_options = policy.mpiexec_options(mpiexec, given)
    added |= policy.variables

    options = ["-n", str(request.ranks)]
    if request.hostfile:
        options += request.hostfile.mpiexec_options(OPEN_MPI if open_mpi else MPICH)
    if open_mpi:
        if root and "--allow-run-as-root" not in given:
            options.append("--allow-run-as-root")
        if batch is None and "map-by" not in given and "oversubscribe" not in given:
            options += ["--map-by", ":OVERSUBSCRIBE"]
        if "bind-to" not in given:  # the default pins each of two ranks to a single core
            options += ["--bind-to", "none"]
        if batch is None and ranks_per_host > cores and "mpi_yield_when_idle" not in given:
            options += ["--mca", "mpi_yield_when_idle", "1"]  # else waiting ranks spin
        options += policy_options
        if request.hostfile or batch:  # MPICH's mpiexec exports the whole environment
            own = [FOLDER, *(name for name in _EXPORTED if name in environ)]
            options += [word for name in dict.fromkeys([*added, *own]) for word in ("-x", name)]
    if request.interface is not None:
        options += _interface_options(request.interface, mpiexec)
    rank = [sys.executable, "-m", "parallel_sgd.launcher.rank"]
    return Launch(
        (mpiexec.path, *options, *request.mpiexec_options, *rank, *request.command), added
    )


def plan_torchrun(request: Request, environ: Mapping[str, str], *, cores: int) -> Launch:
    """Return the command and environment to start ranks of this host by torchrun.

    Read nothing but the arguments, which are those of `plan`.
    """
    assert request.ranks is not None
    batch = allocation(environ)
    if batch is not None and batch.cores is not None:
        cores = min(cores, batch.cores)
    added = _thread_variables(environ, max(1, cores // request.ranks))
    added[TORCHRUN_RANKS] = str(request.ranks)
    added |= request.for_ranks | job_variables(request, environ)
    return Launch(torchrun_command(request), added)


def _interface_options(interface: str, mpiexec: Mpiexec) -> tuple[str, ...]:
    """Return the options for mpiexec's and its daemons' own network.

    The ranks set theirs themselves.
    """
    if mpiexec.vendor != OPEN_MPI:
        return ("-iface", local_interface(interface, interfaces()).name)
    if interface == "lo" or interface.startswith("127."):  # the daemons never use the loopback
        return ()
    if (mpiexec.version or "").startswith(("1.", "2.", "3.", "4.")):
        return ("--mca", "oob_tcp_if_include", interface)
    return ("--prtemca", "prte_if_include", interface)


def _most_ranks_on_a_host(
    ranks: int, hostfile: Hostfile | None, batch: Allocation | None, open_mpi: bool, cores: int
) -> int:
    """Return the number of ranks sharing the cores of the fullest host, as far as known."""
    if hostfile:
        return hostfile.most_ranks_on_a_host(ranks, cores if open_mpi else 1)
    return math.ceil(ranks / batch.hosts) if batch and batch.hosts else ranks


def _thread_variables(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the thread variables not set by the user. OMP_NUM_THREADS counts for all of them."""
    wish = environ.get("OMP_NUM_THREADS", "")
    value = wish if wish.isdecimal() else str(threads)
    return {name: value for name in THREAD_VARIABLES if name not in environ}
