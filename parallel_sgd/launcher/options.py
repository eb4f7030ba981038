"""The arguments of `parallel-sgd run`."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..argument_parser import Parser, path_given
from ..communication.job_environment import (
    GPUS_PER_RANK,
    INTERFACE,
    LOG_DIR,
    PREEMPT_ON,
    REQUEUE,
    SERVERS,
    SPARES,
    WAIT_TIMEOUT_S,
    launched_size,
    launcher_name,
)
from ..communication.liveness.preemption import SIGNALS, chosen_signals, preempt_on, requeues
from ..errors import UserError
from ..validation import require_use, shown
from .batch_systems import allocation
from .host_resources import checked_interface
from .hosts import MOST_RANKS, Hostfile, decimal, read_hostfile

#: Options that only make sense for the process that starts the ranks.
NEED_N = (
    *("hostfile", "timeout_s", "survive", "mpiexec", "mpiexec_options"),
    *("restarts", "min_ranks", "with"),
)

MPIEXEC, TORCHRUN = "mpiexec", "torchrun"


#: An argument with a number of ranks.
_RANKS_OPTION = r"-np?(=?\d+)?"


@dataclass(frozen=True)
class Request:
    """The user's request: the parsed arguments of `parallel-sgd run`."""

    ranks: int | None  #: None: this process is a rank itself, and runs the command
    command: tuple[str, ...]  #: script and arguments, or "-m", module and arguments
    hostfile: Hostfile | None = None
    mpiexec_options: tuple[str, ...] = ()
    mpiexec: str | None = None
    timeout_s: float | None = None
    servers: int | None = None  #: number of ranks that are parameter servers, if given
    survive: bool = False  #: True if the remaining ranks go on after a failure
    spares: int | None = None  #: number of ranks that are spares
    gpus_per_rank: int | None = None
    interface: str | None = None  #: as `checked_interface` returns it
    log_dir: str | None = None
    wait_timeout_s: float | None = None
    restarts: int = 0  #: highest number of restarts
    restart: int = 0  #: number of restarts so far
    min_ranks: int | None = None  #: None: the same as `ranks`
    preempt_on: str | None = None  #: names of signals
    requeue: bool = False
    launcher: str = MPIEXEC  #: or TORCHRUN

    @property
    def for_ranks(self) -> dict[str, str]:
        """The environment variables that pass options to the ranks."""
        variables = {
            SERVERS: self.servers,
            SPARES: self.spares,
            GPUS_PER_RANK: self.gpus_per_rank,
            INTERFACE: self.interface,
            WAIT_TIMEOUT_S: self.wait_timeout_s,
            LOG_DIR: None if self.log_dir is None else os.path.abspath(self.log_dir),
            PREEMPT_ON: self.preempt_on,
            REQUEUE: int(self.requeue) or None,
        }
        return {name: str(value) for name, value in variables.items() if value is not None}


def parse(argv: Sequence[str]) -> Request:
    """Parse the arguments of `parallel-sgd run`.

    Raises:
        UserError: an argument is wrong.
    """
    args = _parser().parse_args(argv)
    command = ("-m", *args.module) if args.module is not None else tuple(args.command)
    ranks = args.ranks
    launched, allocated = launched_size(), allocation(os.environ)
    if ranks is None and launched is not None:
        for flag in NEED_N:
            if getattr(args, flag):
                raise UserError(
                    f"--{flag.replace('_', '-')} needs -n and ranks to be started, but this is "
                    f"one of {launched} ranks that {launcher_name()} has started"
                )
    elif ranks is None:
        ranks = None if allocated is None else allocated.slots
        if ranks is None:
            raise UserError(_missing_ranks_text(command))
    if not command:
        raise UserError("a script must be given: parallel-sgd run -n 4 script.py [argument ...]")
    require_program(command)
    size = ranks or launched or 1
    least = 1  # rank in training
    for name in ("servers", "spares"):
        least += getattr(args, name) or 0
        if least > size:
            raise UserError(
                f"{name}={getattr(args, name)} must be less than the number of ranks, {size}: the "
                "remaining ranks train"
            )
    require_use("spares", args.spares, None, args.survive, "--survive")
    require_use("min_ranks", args.min_ranks, None, args.restarts > 0, "--restarts")
    require_use("min_ranks", args.min_ranks, None, args.hostfile is not None, "--hostfile")
    if args.min_ranks is not None and not least <= args.min_ranks <= size:
        raise UserError(f"min_ranks={args.min_ranks} must be from {least} to {size}, that of -n")
    signals = args.preempt_on or [number.name for number in preempt_on()]
    require_use("requeue", args.requeue, False, bool(signals), "--preempt-on")
    for name in ("hostfile", "log_dir", "mpiexec"):
        if (path := getattr(args, name)) is not None:
            setattr(args, name, path_given(name, path))
    args.launcher = getattr(args, "with") or MPIEXEC
    del args.module, args.__dict__["with"]
    args.ranks, args.command = ranks, command
    args.hostfile = None if args.hostfile is None else read_hostfile(args.hostfile)
    args.mpiexec_options = tuple(args.mpiexec_options)
    args.interface = None if args.interface is None else checked_interface(args.interface)
    args.preempt_on, args.requeue = ",".join(signals) or None, args.requeue or requeues()
    return Request(**vars(args))


def require_program(command: Sequence[str]) -> None:
    """Check the beginning of a command: an existing script, or -m and a module.

    Raises:
        UserError: the command begins otherwise.
    """
    if command[0] == "-m":
        if len(command) == 1:
            raise UserError("-m must be followed by a module")
    elif not os.path.exists(command[0]):
        hint = ""
        if Path(command[0]).name.startswith("python"):
            hint = "; give the script alone, without the interpreter"
        raise UserError(f"script must exist: {command[0]!r} (in {os.getcwd()}){hint}")


def _missing_ranks_text(command: Sequence[str]) -> str:
    """Return the error text for a command line without a number of ranks."""
    position = next(
        (i for i, word in enumerate(command[1:], 1) if re.fullmatch(_RANKS_OPTION, word)), None
    )
    if position is None:
        return "-n must be given: the number of ranks to start"
    words = command[position : position + 1 + (command[position] in ("-n", "-np"))]
    rest = shlex.join([*command[:position], *command[position + len(words) :]])
    return (
        f"{shlex.join(words)} must come before the script, which gets all later arguments: "
        f"parallel-sgd run {shlex.join(words)} {rest}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="parallel-sgd run",
        usage="parallel-sgd run -n N [option ...] (script.py | -m module) [argument ...]",
        description="Start a Python script on N ranks with the mpiexec that fits mpi4py, or with "
        "torchrun, and print the command. An error on one rank ends the job. The exit code is 0 "
        "only if all ranks have finished the program (with --survive: all remaining ranks), else "
        "the job's own or 1; 2 if the job could not be started, 75 if it has left as --preempt-on "
        "says, 124 if it exceeded --timeout-s, 128 + the number of the signal that ended this "
        "command. Started by srun or mpiexec, without -n: be one of their ranks, and run the "
        "script.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_ranks(add, "the number of ranks to start (default in a batch job: its number of tasks)")
    add(
        "--hostfile",
        "-hostfile",
        "-f",
        metavar="FILE",
        help="file of hosts, one a line: `host slots=4` or `host:4`; either form works",
    )
    add(
        "--with",
        choices=(MPIEXEC, TORCHRUN),
        help="start the ranks by MPI's mpiexec (the default), or by PyTorch's torchrun, which "
        "needs no MPI: on this host alone, without --survive and --spares",
    )
    add(
        "--servers",
        type=partial(rank_count, least=0),
        metavar="N",
        help="the last N ranks are parameter servers, for algorithms with servers; 0: every rank "
        "serves a part of the model beside training",
    )
    add(
        "--survive",
        action="store_true",
        help="a failed rank does not end the job: the remaining ranks go back a few steps, share "
        "the data of the failed rank, and train on. The job is complete if all remaining ranks "
        "finish the program and their training sessions. Needs Open MPI 5",
    )
    add(
        "--spares",
        type=partial(rank_count, least=1),
        metavar="N",
        help="with --survive: the last N ranks are on standby, and replace failed ranks",
    )
    add(
        "--restarts",
        type=partial(rank_count, least=0),
        default=0,
        metavar="N",
        help="restart the job, at most N times, if ranks were killed, crashed or stopped "
        "responding (not after an error of the program): a training session with checkpoints "
        "resumes from the newest complete checkpoint",
    )
    add(
        "--min-ranks",
        type=rank_count,
        metavar="N",
        help="with --restarts: skip hosts of the hostfile that no longer answer, and start a rank "
        "for each slot of the remaining hosts, at least N ranks (default: as many as -n)",
    )
    add(
        "--preempt-on",
        type=_signals,
        metavar="SIGNAL",
        help="SIGUSR1, SIGUSR2 or SIGTERM, or several with commas: at this signal to this command "
        "or any rank, training sessions with checkpoints save all state, and the job ends with "
        "exit code 75",
    )
    add(
        "--requeue",
        action="store_true",
        help="with --preempt-on: afterwards have Slurm start the batch job again (scontrol "
        "requeue), to resume from the saved state",
    )
    add(
        "--gpus-per-rank",
        type=rank_count,
        metavar="N",
        help="each rank sees N GPUs of its host, by CUDA_VISIBLE_DEVICES: the first rank of the "
        "host the first N, and so on",
    )
    add(
        "--interface",
        metavar="IFACE",
        help="the network of ranks, MPI, gloo and NCCL to other hosts: an interface's name, or, if "
        "the name differs between hosts, its network, such as 10.0.0.0/24",
    )
    add(
        "--log-dir",
        metavar="FOLDER",
        help="append the output of rank k to rank-k.out and rank-k.err in this folder; the "
        "terminal shows rank 0 and all errors",
    )
    add("--timeout-s", type=seconds, metavar="S", help="end the job after S seconds")
    add(
        "--wait-timeout-s",
        type=seconds,
        metavar="S",
        help="end the job if a rank has waited for other ranks for more than S seconds, unless its "
        "program sets another limit (default: 600)",
    )
    add(
        "--mpiexec",
        metavar="PATH",
        help="use this mpiexec (default: the first that fits, beside python or in PATH)",
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


def add_ranks(add: Callable[..., object], meaning: str, **keywords: Any) -> None:
    """Add the option -n to a parser, by its `add_argument`."""
    add("-n", "-np", dest="ranks", type=rank_count, metavar="N", help=meaning, **keywords)


def rank_count(text: str, least: int = 1) -> int:
    """Parse a number of ranks: the type of the option -n."""
    number = decimal(text)
    if number is None or not least <= number <= MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"must be a whole number from {least} to {MOST_RANKS}: {shown(text)}"
        )
    return number


def seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0: {text!r}")
    return seconds


def _signals(text: str) -> list[str]:
    try:
        return [number.name for number in chosen_signals(text)]
    except UserError:
        raise argparse.ArgumentTypeError(
            f"must be of {', '.join(SIGNALS)}: {shown(text)}"
        ) from None


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be quoted as for a shell: {text!r} ({error})"
        ) from None
