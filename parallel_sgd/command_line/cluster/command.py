"""Run a command on hosts emulated by this machine: `parallel-sgd cluster --hosts 4 -- COMMAND`.

Make hosts, write a hostfile, run the command with access to the hosts, and remove everything,
however the command ends. `mpiexec -hostfile hosts python train.py` works as on real hosts.
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

from ...argument_parser import Parser
from ...errors import UserError
from ...launcher import rank_count, run_job
from ..units import UNLIMITED, bits_per_s
from .hostfile import hostfile_written, require_free_path
from .hosts import emulated_hosts
from .namespaces import remove_leftovers, require

EXAMPLES = """\
examples, as root:
  parallel-sgd cluster --hosts 4 -- mpiexec -hostfile hosts python train.py
  parallel-sgd cluster --hosts 2 --slots 2 --rate 100mbit -- mpiexec -hostfile hosts python train.py
  parallel-sgd cluster --hosts 4 -- parallel-sgd run -n 4 --hostfile hosts train.py
  parallel-sgd cluster --hosts 3 --rate unlimited --hostfile three -- sh
  parallel-sgd cluster --remove

The exit code is the command's; 128 + the signal that ended it; 2 if it could not be started.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `parallel-sgd cluster`, and return the exit code described in `EXAMPLES`.

    Raises:
        UserError: the hosts cannot be made.
    """
    options = _parser().parse_args(argv)
    if options.remove:
        require()
        lines = [f"removed {line}" for line in remove_leftovers()]
        print("\n".join(lines or ["nothing was left behind"]))
        return 0
    command = options.command[options.command[:1] == ["--"] :]
    if not command:
        raise UserError("a command must be given: -- mpiexec -hostfile hosts python train.py")
    return _run(options, command)


def _run(options: argparse.Namespace, command: Sequence[str]) -> int:
    require_free_path(options.hostfile)
    require()
    for line in remove_leftovers():
        print(f"parallel-sgd: removed {line}, left behind", file=sys.stderr)
    with (
        emulated_hosts(options.hosts, options.rate, options.slots) as hosts,
        hostfile_written(options.hostfile, hosts.hostfile, hosts.folder),
    ):
        environ = {**os.environ, **hosts.environment}
        if shutil.which(command[0], path=environ["PATH"]) is None:
            raise UserError(f"command must be a program in PATH: {command[0]!r}")
        links = UNLIMITED if options.rate == math.inf else f"of {options.rate / 1e6:g} Mbit/s"
        print(
            f"parallel-sgd: {options.hosts} host{'s' * (options.hosts > 1)}, "
            f"slots={options.slots}, links {links}, in {options.hostfile}: "
            f"{shlex.join(command)}",
            file=sys.stderr,
            flush=True,
        )
        return run_job([*hosts.inside, *command], environ).code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="parallel-sgd cluster",
        usage="parallel-sgd cluster [option ...] -- command [argument ...]",
        description="Run a command on emulated hosts of this machine: network namespaces, "
        "each\nwith an address and a name, on limited links. Cores and memory are this "
        "machine's.\nNeeds root, iproute2, and Open MPI 5 or MPICH.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--hosts", type=rank_count, default=4, metavar="K", help="number of hosts (default: 4)")
    add("--slots", type=rank_count, default=1, metavar="S", help="ranks of each host (default: 1)")
    add(
        "--rate",
        type=bits_per_s,
        default=1e9,
        metavar="R",
        help="rate of each link, in each direction: 100mbit, 1gbit (default), unlimited",
    )
    add(
        "--hostfile",
        type=Path,
        default=Path("hosts"),
        metavar="FILE",
        help="hostfile to write, and to remove at the end (default: hosts)",
    )
    add(
        "--remove",
        action="store_true",
        help="only remove and list the remains of killed clusters",
    )
    add(
        "command",
        nargs=argparse.REMAINDER,
        metavar="command [argument ...]",
        help="command to run in the cluster, with its arguments",
    )
    return parser
