"""`parallel-sgd run`: start a script on N ranks, without the traps of doing it by hand.

It takes the mpiexec of the MPI that mpi4py is bound to, gives it the options that it needs here
(root, more ranks than cores, the hostfile in its dialect), shares the cores among the ranks, prints
the command, and runs it. Under Slurm, PBS, LSF or Grid Engine it leaves hosts and placing to them.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..communication.launched import (
    REQUESTED_RANKS,
    SERVERS,
    SURVIVE,
    launched_rank,
    launched_size,
    launcher_name,
)
from ..errors import UserError
from ..validation import shown
from .cores import usable_cores
from .hostfiles import MOST_RANKS, MPICH, OPEN_MPI, Hostfile, decimal, read_hostfile
from .job import run_job
from .mpi_runtime import Mpiexec, bound_mpi, choose_mpiexec
from .parser import Parser
from .roll import Roll

#: Each says how many threads one library starts in a rank, unless the user has set it.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)

#: Batch systems: the variable that shows that one has given hosts to this process, and the one that
#: may say how many.
_BATCH_SYSTEMS = {
    "Slurm": ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"),
    "PBS": ("PBS_NODEFILE", "PBS_NUM_NODES"),
    "LSF": ("LSB_JOBID", ""),
    "Grid Engine": ("PE_HOSTFILE", "NHOSTS"),
}

#: Open MPI's options with which ranks outlive another, by what shows that the user has set one.
#: Some of its collectives give wrong sums after a failure: those are left out. To name one that is
#: not in this Open MPI does no harm.
_SURVIVE_OPTIONS = {
    "with-ft": ("--with-ft", "ulfm"),
    "mca coll ": ("--mca", "coll", "^hcoll,portals4,han,cuda"),
}


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    ranks: int
    command: tuple[str, ...]  #: script and arguments, or "-m", module and arguments
    hostfile: Hostfile | None = None
    mpiexec_options: tuple[str, ...] = ()
    mpiexec: str | None = None
    timeout_s: float | None = None
    servers: int | None = None  #: how many of the ranks are parameter servers, where it is said
    survive: bool = False  #: whether a rank's death leaves the others running


@dataclass(frozen=True)
class Launch:
    """What is run for it: a command, and what is added to the environment."""

    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """The same as a line for a shell."""
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*assignments, shlex.join(self.command)])


def main(argv: Sequence[str]) -> int:
    """`parallel-sgd run`: returns the job's exit code, or raises a UserError before it starts."""
    request = parse(argv)
    name = launcher_name()
    if name is not None:
        raise UserError(
            f"run must not be started by a launcher: this is already rank {launched_rank()} of "
            f"{launched_size()}, started by {name}. There, start the script itself: "
            f"python -m parallel_sgd.command_line.rank {shlex.join(request.command)}"
        )
    vendor = bound_mpi()["vendor"]
    mpiexec = choose_mpiexec(vendor, request.mpiexec)
    launch = plan(request, mpiexec, os.environ, cores=usable_cores(), root=os.geteuid() == 0)
    print(f"parallel-sgd: {launch.line()}", file=sys.stderr, flush=True)
    with Roll(request.ranks) as roll:
        environ = {**os.environ, **launch.environ, **roll.environ}
        return run_job(
            launch.command, environ, request.timeout_s, None if request.survive else roll
        )


def plan(
    request: Request, mpiexec: Mpiexec, environ: Mapping[str, str], *, cores: int, root: bool
) -> Launch:
    """The command and environment for a request. Reads nothing but its arguments.

    Args:
        environ: the user's environment: what is set there stays.
        cores: that this process may use; other hosts are taken to have as many.
        root: whether this process is root's.

    Raises:
        UserError: the hostfile cannot be told to this mpiexec, or it cannot do what is asked.
    """
    open_mpi = mpiexec.vendor == OPEN_MPI
    batch = None if request.hostfile else batch_system(environ)
    here = _most_ranks_on_a_host(request, environ, batch, open_mpi, cores)
    added = _threads(environ, max(1, cores // here))
    added[REQUESTED_RANKS] = str(request.ranks)
    if request.servers is not None:
        added[SERVERS] = str(request.servers)
    if request.survive:
        _require_survival(mpiexec)
        added[SURVIVE] = "1"

    options = ["-n", str(request.ranks)]
    if request.hostfile:
        options += request.hostfile.mpiexec_options(OPEN_MPI if open_mpi else MPICH)
    if open_mpi:
        given = " ".join(request.mpiexec_options)
        if root and "--allow-run-as-root" not in given:
            options.append("--allow-run-as-root")
        if batch is None:
            if "map-by" not in given and "oversubscribe" not in given:
                options += ["--map-by", ":OVERSUBSCRIBE"]
            if "bind-to" not in given:  # it would pin each of two ranks to one core of many
                options += ["--bind-to", "none"]
            if here > cores and "mpi_yield_when_idle" not in given:  # its waiting ranks spin
                options += ["--mca", "mpi_yield_when_idle", "1"]
        if request.survive:
            for shows, words in _SURVIVE_OPTIONS.items():
                options += words if shows not in given else ()
        if request.hostfile or batch:  # MPICH's passes on the whole environment
            own = [name for name in (SERVERS, SURVIVE, "PYTHONPATH") if name in environ]
            options += [word for name in dict.fromkeys([*added, *own]) for word in ("-x", name)]
    rank = [sys.executable, "-m", "parallel_sgd.command_line.rank"]
    return Launch(
        (mpiexec.path, *options, *request.mpiexec_options, *rank, *request.command), added
    )


def batch_system(environ: Mapping[str, str]) -> str | None:
    """The batch system that has given this process its hosts, which mpiexec then asks; or None."""
    return next((name for name, (shows, _) in _BATCH_SYSTEMS.items() if environ.get(shows)), None)


def parse(argv: Sequence[str]) -> Request:
    """Read the arguments of `parallel-sgd run`; raises a UserError where one is wrong."""
    given = _parser().parse_args(argv)
    command = ("-m", *given.module) if given.module is not None else tuple(given.command)
    if given.ranks is None:
        raise UserError("-n must be given: how many ranks to start")
    if given.module is not None:
        if not given.module:
            raise UserError("-m must be followed by a module")
    elif not command:
        raise UserError("a script must be given: parallel-sgd run -n 4 script.py [argument ...]")
    elif not os.path.exists(command[0]):
        hint = ""
        if Path(command[0]).name.startswith("python"):
            hint = "; give the script alone, without the interpreter"
        raise UserError(f"script must exist: {command[0]!r} (in {os.getcwd()}){hint}")
    if given.servers is not None and given.servers >= given.ranks:
        raise UserError(
            f"servers={given.servers} must be less than the number of ranks, {given.ranks}: "
            "the others train"
        )
    return Request(
        ranks=given.ranks,
        command=command,
        hostfile=None if given.hostfile is None else read_hostfile(given.hostfile),
        mpiexec_options=tuple(given.mpiexec_options),
        mpiexec=given.mpiexec,
        timeout_s=given.timeout_s,
        servers=given.servers,
        survive=given.survive,
    )


def _require_survival(mpiexec: Mpiexec) -> None:
    major = (mpiexec.version or "").partition(".")[0]
    if mpiexec.vendor != OPEN_MPI or (major.isdecimal() and int(major) < 5):
        mpi = f"{mpiexec.vendor or 'of an unknown vendor'} {mpiexec.version or ''}".strip()
        raise UserError(
            f"--survive needs Open MPI 5 or later: {mpiexec.path} is {mpi}, which ends the job "
            "with the first rank that dies"
        )


def _most_ranks_on_a_host(
    request: Request, environ: Mapping[str, str], batch: str | None, open_mpi: bool, cores: int
) -> int:
    """How many ranks share the cores of the fullest host, as far as can be told."""
    if request.hostfile:
        return request.hostfile.most_ranks_on_a_host(request.ranks, cores if open_mpi else 1)
    nodes = environ.get(_BATCH_SYSTEMS[batch][1], "") if batch else ""
    return math.ceil(request.ranks / int(nodes)) if nodes.isdecimal() else request.ranks


def _threads(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """The thread variables that the user has not set; OMP_NUM_THREADS speaks for all."""
    wish = environ.get("OMP_NUM_THREADS", "")
    value = wish if wish.isdecimal() else str(threads)
    return {name: value for name in THREAD_VARIABLES if name not in environ}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="parallel-sgd run",
        usage="parallel-sgd run -n N [option ...] (script.py | -m module) [argument ...]",
        description="Start a Python script on N ranks with the mpiexec that fits mpi4py, and print "
        "the command. An error on one rank ends the job. The exit code is the job's; 2 where it "
        "could not be started, 124 where it outran --timeout-s.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "-np", dest="ranks", type=rank_count, metavar="N", help="how many ranks to start")
    add(
        "--hostfile",
        "-hostfile",
        "-f",
        metavar="FILE",
        help="hosts, one a line: `host slots=4` or `host:4`; either dialect with either MPI",
    )
    add(
        "--servers",
        type=partial(rank_count, least=0),
        metavar="N",
        help="the last N of the ranks are parameter servers, for an algorithm that has them; 0: "
        "every rank serves a part beside training",
    )
    add(
        "--survive",
        action="store_true",
        help="a rank that is killed does not end the job, where the program can go on without it "
        "(a parameter server's workers). Needs Open MPI 5, whose exit "
        "code then says nothing of ranks that were killed: it is 0 even where all were",
    )
    add("--timeout-s", type=_seconds, metavar="S", help="end the job after S seconds")
    add(
        "--mpiexec",
        metavar="PATH",
        help="take this mpiexec; else the first that fits, beside python or in PATH",
    )
    add(
        "--mpiexec-options",
        type=_words,
        default=[],
        metavar="'OPTION ...'",
        help="more options for mpiexec: --mpiexec-options='--map-by numa'",
    )
    add(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="module",
        help="run a module instead of a script",
    )
    add("command", nargs=argparse.REMAINDER, metavar="script.py [argument ...]",
        help="the script and its arguments")  # fmt: skip
    return parser


def rank_count(text: str, least: int = 1) -> int:
    """The type of the option -n."""
    number = decimal(text)
    if number is None or not least <= number <= MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"must be a whole number from {least} to {MOST_RANKS}: {shown(text)}"
        )
    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0: {text!r}")
    return seconds


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be quoted as for a shell: {text!r} ({error})"
        ) from None
