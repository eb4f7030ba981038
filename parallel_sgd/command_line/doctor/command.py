"""Check this machine or a cluster, and advise on its problems: `parallel-sgd doctor`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...argument_parser import Parser
from ...communication.entry_point import abort_on_error
from ...communication.job_environment import launched_rank, launched_size, launcher_name
from ...errors import UserError
from ...launcher import add_ranks, allocation, bound_mpi, find_mpiexecs, identify, seconds
from ..on_ranks import ask_ranks, slots_of
from . import checks
from .checks import Finding
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
        found = _check_without_launcher(args)
    else:
        if args.ranks is not None or args.hostfile is not None or args.interface is not None:
            raise UserError(
                f"-n, --hostfile and --interface must not be given if {launcher_name()} has "
                f"started the ranks: its {launched} ranks are checked"
            )
        with abort_on_error():
            found = examine_ranks()
        if launched_rank():
            return 0
    print(json.dumps(found, indent=2) if args.json else text(found), flush=True)
    return int(any(finding["level"] == "problem" for finding in found["findings"]))


def _check_without_launcher(args: argparse.Namespace) -> dict[str, Any]:
    """Check this machine, then start ranks for the remaining checks. Return all findings."""
    findings = _check_mpi()
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
        return [Finding("mpi", "problem", str(error), advice)]
    return checks.mpi(
        bound["vendor"], bound["version"], mpiexecs, first_in_path=shutil.which("mpiexec")
    )


def _run_ranks(args: argparse.Namespace) -> dict[str, Any]:
    """Start ranks, and return their findings and measurements."""
    allocated = allocation(os.environ)
    slots = slots_of(args.hostfile) or (allocated and allocated.slots)
    ranks = args.ranks or slots or DEFAULT_RANKS
    options = ["--timeout-s", str(args.timeout_s)]
    if args.interface is not None:
        options += ["--interface", args.interface]
    found = ask_ranks(f"{__package__}.ranks", ranks, args.hostfile, options)
    if not isinstance(found, int):
        return found
    failed = Finding(
        "ranks",
        "problem",
        f"{ranks} ranks ended with exit code {found}; their errors are above",
        "make sure that `ssh HOST true` works without a password for each host, that this project "
        "and Python are under the same path there, and that no firewall is between the hosts",
    )
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
        "--timeout-s",
        type=seconds,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help=f"give up after S seconds (default: {DEFAULT_TIMEOUT_S:g})",
    )
    add("--json", action="store_true", help="print one JSON object with all measurements instead")
    return parser
