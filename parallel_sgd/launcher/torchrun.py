"""Start ranks by PyTorch's launcher, without MPI: `parallel-sgd run --with torchrun`."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from ..errors import UserError
from .batch_systems import Allocation
from .hosts import Hostfile
from .options import Request
from .reachable_hosts import Hosts

#: Started by its path: a process with this package imported takes itself for a rank. With -P,
#: modules beside it do not stand in for others.
_TORCHRUN = Path(__file__).with_name("quiet_torchrun.py")

#: Options of `parallel-sgd run` for ranks of MPI alone.
_NEED_MPI = ("survive", "spares", "mpiexec", "mpiexec_options")


def torchrun_command(request: Request) -> tuple[str, ...]:
    """Return the command to start the ranks on this host."""
    ranks = ("--standalone", "--nproc-per-node", str(request.ranks))
    rank = ("-m", "parallel_sgd.launcher.rank")
    return (sys.executable, "-P", str(_TORCHRUN), *ranks, *rank, *request.command)


def require_torchrun(request: Request, hosts: Hosts) -> None:
    """Check the request: an error if torchrun cannot fulfil it.

    Raises:
        UserError: PyTorch is not installed, an option needs MPI, or the hosts are several.
    """
    if find_spec("torch") is None:
        raise UserError("--with torchrun needs PyTorch: pip install '.[torch]' from the checkout")
    for name in _NEED_MPI:
        if getattr(request, name) != getattr(Request, name):  # the default
            raise UserError(
                f"--{name.replace('_', '-')} needs ranks of MPI, and --with torchrun starts "
                "others: leave one of the two options away"
            )
    if "SIGTERM" in (request.preempt_on or ""):
        raise UserError(
            f"--preempt-on {request.preempt_on}: torchrun ends its ranks at SIGTERM; with it give "
            "SIGUSR1 or SIGUSR2"
        )
    if hosts.any_remote:
        raise UserError(
            "--with torchrun starts ranks on this host alone, and the job has others: on each "
            f"host run {shlex.join(_by_hand(request, hosts.hostfile, hosts.batch))}"
        )


def _by_hand(
    request: Request, hostfile: Hostfile | None, batch: Allocation | None
) -> tuple[str, ...]:
    """Return the command for each host of several. Unknown values are in capitals."""
    assert request.ranks is not None
    names = list(dict.fromkeys(host.name for host in hostfile.hosts)) if hostfile else []
    count = len(names) or (batch and batch.hosts) or 0
    each, rest = divmod(request.ranks, count) if count else (0, 1)
    return (
        *("python", "-m", "torch.distributed.run", "--nnodes", str(count or "HOSTS")),
        *("--nproc-per-node", "RANKS" if rest else str(each)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint"),
        f"{names[0] if names else 'FIRST_HOST'}:29400",
        *request.command,
    )
