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
from ..validation import shown
from .batch_systems import allocation
from .hosts import MOST_RANKS, Hostfile, decimal, read_hostfile
from .interfaces import checked_interface

#: Options that only make sense for the process that starts the ranks.
NEED_N = (
    *("hostfile", "timeout_s", "survive", "mpiexec", "mpiexec_options"),
    *("restarts", "min_ranks"),
)


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
    if args.module is not None:
        if not args.module:
            raise UserError("-m must be followed by a module")
    elif not command:
        raise UserError("a script must be given: parallel-sgd run -n 4 script.py [argument ...]")
    elif not os.path.exists(command[0]):
        hint = ""
        if Path(command[0]).name.startswith("python"):
            hint = "; give the script alone, without the interpreter"
        raise UserError(f"script must exist: {command[0]!r} (in {os.getcwd()}){hint}")
    size = ranks or launched or 1
    if args.servers is not None and args.servers >= size:
        raise UserError(
            f"servers={args.servers} must be less than the number of ranks, {size}: "
            "the others train"
        )
    _check_spares(args, size)
    if args.min_ranks is not None and not args.restarts:
        raise UserError(f"min_ranks={args.min_ranks} has no effect without --restarts")
    if args.min_ranks is not None and args.hostfile is None:
        raise UserError(
            f"min_ranks={args.min_ranks} has no effect without --hostfile: its hosts are left out"
        )
    least, most = (args.servers or 0) + (args.spares or 0) + 1, size
    if args.min_ranks is not None and not least <= args.min_ranks <= most:
        raise UserError(f"min_ranks={args.min_ranks} must be from {least} to {most}, that of -n")
    signals = args.preempt_on or [number.name for number in preempt_on()]
    if args.requeue and not signals:
        raise UserError("requeue=True needs --preempt-on: at which signal the job is to leave")
    for name in ("hostfile", "log_dir", "mpiexec"):
        if (path := getattr(args, name)) is not None:
            setattr(args, name, path_given(name, path))
    return Request(
        ranks=ranks,
        command=command,
        hostfile=None if args.hostfile is None else read_hostfile(args.hostfile),
        mpiexec_options=tuple(args.mpiexec_options),
        mpiexec=args.mpiexec,
        timeout_s=args.timeout_s,
        servers=args.servers,
        survive=args.survive,
        spares=args.spares,
        gpus_per_rank=args.gpus_per_rank,
        interface=None if args.interface is None else checked_interface(args.interface),
        log_dir=args.log_dir,
        wait_timeout_s=args.wait_timeout_s,
        restarts=args.restarts,
        min_ranks=args.min_ranks,
        preempt_on=",".join(signals) or None,
        requeue=args.requeue or requeues(),
    )


def _missing_ranks_text(command: Sequence[str]) -> str:
    """Return the error text for a command line without a number of ranks."""
    position = next(
        (i for i, word in enumerate(command[1:], 1) if re.fullmatch(_RANKS_OPTION, word)), None
    )
    if position is None:
        return "-n must be given: how many ranks to start"
    words = command[position : position + 1 + (command[position] in ("-n", "-np"))]
    rest = shlex.join([*command[:position], *command[position + len(words) :]])
    return (
        f"{shlex.join(words)} must stand before the script, which gets what is behind it: "
        f"parallel-sgd run {shlex.join(words)} {rest}"
    )


def _check_spares(args: argparse.Namespace, size: int) -> None:
    if args.spares is None:
        return
    if not args.survive:
        raise UserError(f"spares={args.spares} needs --survive: they take the place of dead ranks")
    if args.spares + (args.servers or 0) >= size:
        raise UserError(
            f"spares={args.spares} must be less than the number of ranks, {size}: the others train"
        )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="parallel-sgd run",
        usage="parallel-sgd run -n N [option ...] (script.py | -m module) [argument ...]",
        description="Start a Python script on N ranks with the mpiexec that fits mpi4py, and print "
        "the command. An error on one rank ends the job. The exit code is 0 only where the program "
        "has come to its end on all ranks (those that are left, with --survive), else the job's or "
        "1; 2 where it could not be started, 75 where it has left as --preempt-on says, 124 where "
        "it outran --timeout-s, 128 + the number of a signal that has ended it. Started by srun or "
        "mpiexec, without -n: be one of their ranks, and run the script.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_ranks(add, "how many ranks to start; in a batch job, if not given: as many as it is for")
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
        help="a rank that is killed does not end the job: the others go back by some steps, deal "
        "out its data among themselves, and train on. It is complete where those that are left "
        "come to the end of the program, and their training sessions to it. Needs Open MPI 5",
    )
    add(
        "--spares",
        type=partial(rank_count, least=1),
        metavar="N",
        help="with --survive: the last N of the ranks wait in reserve, and take the places of "
        "those that are killed",
    )
    add(
        "--restarts",
        type=partial(rank_count, least=0),
        default=0,
        metavar="N",
        help="start the job again, N times at most, where ranks were killed, have crashed, or were "
        "silent (not where the program has failed by an error): a training session with "
        "checkpoints goes on from the newest that is whole",
    )
    add(
        "--min-ranks",
        type=rank_count,
        metavar="N",
        help="with --restarts: leave out hosts of the hostfile that do not answer any more, and "
        "start as many ranks as the others have slots for, at least N (default: as many as -n)",
    )
    add(
        "--preempt-on",
        type=_signals,
        metavar="SIGNAL",
        help="at SIGUSR1, SIGUSR2 or SIGTERM (or several, with commas) to this command or to any "
        "rank, training sessions with checkpoints save all state, and the job ends with exit code "
        "75",
    )
    add(
        "--requeue",
        action="store_true",
        help="with --preempt-on: then have Slurm start the batch job again (scontrol requeue), "
        "which goes on from there",
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
        help="the network by which ranks, MPI, gloo and NCCL talk to other hosts: an interface's "
        "name, or where it is not the same on all hosts its network, such as 10.0.0.0/24",
    )
    add(
        "--log-dir",
        metavar="FOLDER",
        help="what rank k prints goes to rank-k.out and rank-k.err there, behind what they hold; "
        "on the terminal are rank 0 and all errors",
    )
    add("--timeout-s", type=seconds, metavar="S", help="end the job after S seconds")
    add(
        "--wait-timeout-s",
        type=seconds,
        metavar="S",
        help="end the job where a rank has waited for others for more than S seconds, unless its "
        "program says another time (default: 600)",
    )
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
