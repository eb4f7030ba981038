"""`python -m benchmarks.cluster --hosts 4 -- COMMAND`: run a command on a cluster of its own.

Makes hosts, writes a hostfile, runs the command where it can reach them, and removes everything
again, whatever ends it. `mpiexec -hostfile hosts python train.py` works as on real hosts.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from parallel_sgd import UserError
from parallel_sgd.command_line.job import run_job
from parallel_sgd.command_line.launcher import rank_count
from parallel_sgd.command_line.parser import Parser
from parallel_sgd.command_line.units import UNLIMITED, bits_per_s

from .hostfile import require_free, written
from .hosts import emulated_hosts
from .namespaces import remove_leftovers, require


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        The command's exit code; 128 + the signal that ended it; 2 where it could not be started.
    """
    try:
        options = _parser().parse_args(argv)
        return _remove() if options.remove else _run(options)
    except UserError as error:
        print(f"cluster: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace) -> int:
    if not options.command:
        raise UserError("a command must be given: -- mpiexec -hostfile hosts python train.py")
    require_free(options.hostfile)
    require()
    for line in remove_leftovers():
        print(f"cluster: removed {line}, left behind", file=sys.stderr)
    with (
        emulated_hosts(options.hosts, options.rate, options.slots) as hosts,
        written(options.hostfile, hosts.hostfile, hosts.folder),
    ):
        environ = {**os.environ, **hosts.environment}
        if shutil.which(options.command[0], path=environ["PATH"]) is None:
            raise UserError(f"command must be a program in PATH: {options.command[0]!r}")
        print(
            f"cluster: {options.hosts} hosts, slots={options.slots}, links {_words(options.rate)}, "
            f"in {options.hostfile}: {shlex.join(options.command)}",
            file=sys.stderr,
            flush=True,
        )
        return run_job([*hosts.inside, *options.command], environ)


def _remove() -> int:
    require()
    found = remove_leftovers()
    print("\n".join(f"removed {line}" for line in found) if found else "nothing was left behind")
    return 0


def _words(rate: float) -> str:
    return UNLIMITED if rate == math.inf else f"of {rate / 1e6:g} Mbit/s"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m benchmarks.cluster",
        usage="python -m benchmarks.cluster [option ...] -- command [argument ...]",
        description="Run a command on hosts that this machine emulates: network namespaces, each "
        "with an address and a name, on limited links. As root, with iproute2.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--hosts", type=rank_count, default=4, metavar="K", help="how many (default: 4)")
    add("--slots", type=rank_count, default=1, metavar="S", help="ranks of each (default: 1)")
    add(
        "--rate",
        type=bits_per_s,
        default=1e9,
        metavar="R",
        help="of each link, in each direction: 100mbit, 1gbit (default), unlimited",
    )
    add(
        "--hostfile",
        type=Path,
        default=Path("hosts"),
        metavar="FILE",
        help="to write, and to remove at the end (default: hosts)",
    )
    add(
        "--remove",
        action="store_true",
        help="only remove what a killed one has left behind, and say what was found",
    )
    add("command", nargs="*", metavar="command [argument ...]", help="to run in the cluster")
    return parser


if __name__ == "__main__":
    sys.exit(main())
