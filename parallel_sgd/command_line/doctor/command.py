"""Check this machine or a cluster, and advise on its problems: `parallel-sgd doctor`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from ...argument_parser import Parser, path_given
from ...communication.entry_point import abort_on_error
from ...communication.job_environment import launched_rank, launched_size, launcher_name
from ...errors import UserError
from ...launcher import (
    MPIEXEC,
    TORCHRUN,
    add_ranks,
    allocation,
    bound_mpi,
    find_mpiexecs,
    identify,
    require_program,
    seconds,
)
from ...validation import require_use, shown
from ..on_ranks import ask_ranks, slots_of
from . import checks
from .checks import Finding
from .job_script import (
    DEFAULT_COMMAND,
    SLURM,
    JobScript,
    ranks_of_hosts,
    require_job_place,
)
from .ranks import examine_ranks

DEFAULT_RANKS = 2  #: ranks to start if no number is given
DEFAULT_TIMEOUT_S = 300.0  #: limit for all the ranks' work, if not given

_LABELS = {"ok": "ok", "warning": "WARNING", "problem": "PROBLEM"}


def main(argv: Sequence[str]) -> int:
    """Run `parallel-sgd doctor`. Return 1 if there is a problem, else 0.

    Raises:
        UserError: an argument is wrong.
    """
    args = _parser().parse_args(argv)
    launched = launched_size()
    if launched is None:
        _require_job(args)
        found = _check_without_launcher(args)
    else:
        given = [args.ranks, args.hostfile, args.interface, getattr(args, "with"), args.job]
        if args.command or given != [None] * len(given):
            raise UserError(
                "-n, --hostfile, --interface, --with, --job and a program must not be given if "
                f"{launcher_name()} has started the ranks: its {launched} ranks are checked"
            )
        with abort_on_error():
            found = examine_ranks()
        if launched_rank():
            return 0
    print(json.dumps(found, indent=2) if args.json else text(found), flush=True)
    problems = [one["check"] for one in found["findings"] if one["level"] == "problem"]
    if args.job is not None:
        _write_job(args, found, problems)
    return int(bool(problems))


def _require_job(args: argparse.Namespace) -> None:
    """Check --job and its program, and complete the program.

    Raises:
        UserError: an argument is wrong or has no effect.
    """
    args.command = args.command[args.command[:1] == ["--"] :]
    require_use("program", " ".join(args.command), "", args.job is not None, "--job FILE")
    if getattr(args, "with") == TORCHRUN and args.hostfile is not None:
        raise UserError(
            f"--hostfile={shown(args.hostfile)} must not be given with --with torchrun, which "
            "starts ranks on this host alone"
        )
    if args.job is not None:
        args.job = path_given("--job", args.job)
        args.command = args.command or [*DEFAULT_COMMAND]
        require_program(args.command)
        require_job_place(args.job)


def _write_job(args: argparse.Namespace, found: dict[str, Any], problems: Sequence[str]) -> None:
    """Write the job script unless there is a problem, and print a line about it."""
    file = sys.stderr if args.json else sys.stdout
    if problems:
        what = ", ".join(dict.fromkeys(problems))
        print(f"\n{args.job} was not written: there is a problem with {what}", file=file)
        return
    batch = None if args.hostfile else allocation(os.environ)
    script = JobScript(
        command=args.command,
        options=_options(args),
        ranks_of_hosts=ranks_of_hosts([rank["host"] for rank in found["ranks"]]),
        batch=batch and batch.name,
        environ=os.environ,
        folder=os.getcwd(),
    )
    script.write(args.job)
    path = shlex.quote(args.job if os.sep in args.job else os.path.join(".", args.job))
    start = f"sbatch {path}" if script.batch == SLURM else path
    print(f"\n{args.job} starts {script.start}: {start}", file=file)
    if batch is None and args.hostfile is None and shutil.which("sbatch"):
        print(
            "Slurm is installed here. For a job on its nodes, run the doctor in an allocation: "
            f"salloc --nodes=2 --ntasks-per-node=2 parallel-sgd doctor --job {path}",
            file=file,
        )


def _options(args: argparse.Namespace) -> list[str]:
    """Return the options of `parallel-sgd run` for the ranks, except for -n and a time limit."""
    given = {"--with": getattr(args, "with"), "--hostfile": args.hostfile}
    given["--interface"] = args.interface
    return [word for pair in given.items() if pair[1] is not None for word in pair]


def _check_without_launcher(args: argparse.Namespace) -> dict[str, Any]:
    """Check this machine, then start ranks for the remaining checks. Return all findings."""
    findings = _check_torch() if getattr(args, "with") == TORCHRUN else _check_mpi()
    measured: dict[str, Any] = {"findings": [], "ranks": [], "pairs": []}
    if all(finding.level != "problem" for finding in findings):
        measured = _run_ranks(args)
    measured["findings"] = [*map(asdict, findings), *measured["findings"]]
    return measured


def _check_mpi() -> list[Finding]:
    try:
        bound = bound_mpi()
        mpiexecs = [identify(path) for path in find_mpiexecs()]
    except UserError as error:
        advice = (
            "pip install '.[mpich]' from the checkout, or load the module of your cluster's MPI"
        )
        if find_spec("torch") is not None:
            advice += "; or check this host without MPI: --with torchrun"
        return [Finding("mpi", "problem", str(error), advice)]
    return checks.mpi(
        bound["vendor"], bound["version"], mpiexecs, first_in_path=shutil.which("mpiexec")
    )


def _check_torch() -> list[Finding]:
    return checks.torchrun(None if find_spec("torch") is None else metadata.version("torch"))


def _run_ranks(args: argparse.Namespace) -> dict[str, Any]:
    """Start ranks, and return their findings and measurements."""
    allocated = allocation(os.environ)
    slots = slots_of(args.hostfile) or (allocated and allocated.slots)
    ranks = args.ranks or slots or DEFAULT_RANKS
    options = [*_options(args), "--timeout-s", str(args.timeout_s)]
    found = ask_ranks(f"{__package__}.ranks", ranks, None, options)
    if not isinstance(found, int):
        return found
    advice = (
        "make sure that `ssh HOST true` works without a password for each host, that this project "
        "and Python are under the same path there, and that no firewall is between the hosts"
    )
    if getattr(args, "with") == TORCHRUN:
        advice = "mend the errors above; torchrun starts ranks on this host alone"
    says = f"{ranks} ranks ended with exit code {found}; their errors are above"
    failed = Finding("ranks", "problem", says, advice)
    return {"findings": [asdict(failed)], "ranks": [], "pairs": []}


def text(found: dict[str, Any]) -> str:
    """Return findings as lines, the worst last, below a table of the pairs of hosts."""
    lines = []
    if found["pairs"]:
        width = max(len(host) for pair in found["pairs"] for host in pair["hosts"])
        lines.append(f"{'hosts':<{2 * width + 2}}  MB/s there   back  us one way")
        for pair in found["pairs"]:
            first, second = pair["hosts"]
            there, back = (rate / 1e6 for rate in pair["bytes_per_s"])
            lines.append(
                f"{first:<{width}}  {second:<{width}}  {there:>10,.0f} {back:>6,.0f} "
                f"{pair['latency_s'] * 1e6:>11,.0f}"
            )
        lines.append("")
    order = list(_LABELS)
    for finding in sorted(found["findings"], key=lambda finding: order.index(finding["level"])):
        lines.append(f"{_LABELS[finding['level']]:<8} {finding['check']}: {finding['says']}")
        if finding["advice"]:
            lines.append(f"{'':<8} to do: {finding['advice']}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="parallel-sgd doctor",
        description="Check MPI, versions, cores, threads, memory, names, networks, clocks, and the "
        "speed of hosts and of their links; say how to mend problems. Under srun or mpiexec the "
        "ranks check themselves. The exit code is 1 if there is a problem, else 0.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_ranks(
        add,
        "the number of ranks to start (default: one for each slot of the hostfile or the batch "
        f"job, else {DEFAULT_RANKS})",
    )
    add("--hostfile", metavar="FILE", help="file of hosts, as for `parallel-sgd run`")
    add("--interface", metavar="IFACE", help="the network to use, as for `parallel-sgd run`")
    add(
        "--with",
        choices=(MPIEXEC, TORCHRUN),
        help="the launcher to check, as for `parallel-sgd run` (default: mpiexec)",
    )
    add(
        "--timeout-s",
        type=seconds,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help=f"give up after S seconds (default: {DEFAULT_TIMEOUT_S:g})",
    )
    add("--json", action="store_true", help="print one JSON object with all measurements instead")
    add(
        "--job",
        metavar="FILE",
        help="if there is no problem, write a bash script that starts a program on the same "
        "ranks; for Slurm if the hosts are from Slurm",
    )
    add(
        "command",
        nargs=argparse.REMAINDER,
        metavar="script.py [argument ...]",
        help="with --job: the program and its arguments, as for `parallel-sgd run` (default: "
        f"{' '.join(DEFAULT_COMMAND)})",
    )
    return parser
