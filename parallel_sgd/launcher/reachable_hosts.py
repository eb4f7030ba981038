"""Which hosts of a hostfile still answer, and how many ranks they have room for."""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from ..communication.stderr import write_stderr
from .batch_systems import Allocation
from .hosts import MPICH, Hostfile
from .interfaces import interfaces
from .options import Request

#: How long a host may take to answer.
ANSWER_S = 15.0

#: Variables and options of mpiexec that name a program in place of ssh.
_AGENTS = (
    "HYDRA_LAUNCHER_EXEC",
    "PRTE_MCA_plm_ssh_agent",
    "OMPI_MCA_plm_ssh_agent",
    "OMPI_MCA_plm_rsh_agent",  # before Open MPI 5
)
_AGENT_OPTIONS = ("-launcher-exec", "plm_ssh_agent", "plm_rsh_agent")


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job.

    Args:
        hostfile, batch: where they are from; None: not from there.
        vendor: of the MPI.
        mpiexec_options: the user's.
        environ: the user's environment.
    """

    hostfile: Hostfile | None
    batch: Allocation | None
    vendor: str | None
    mpiexec_options: Sequence[str]
    environ: Mapping[str, str]

    @property
    def elsewhere(self) -> bool:
        """Whether some are, or may be, other ones than this. Local."""
        if self.hostfile is None:
            return self.batch is not None and self.batch.hosts != 1
        return any(not _is_here(host.name) for host in self.hostfile.hosts)

    def possible(self, request: Request) -> Request | None:
        """The request, of the hosts that answer and as many ranks as they have room for; None where
        those are fewer than the user wants at least. Waits for 64 of them at a time, `ANSWER_S` at
        most."""
        if self.hostfile is None or not self.elsewhere:
            return request
        if any(host.option for host in self.hostfile.hosts):  # no list of hosts could say them
            return request
        assert request.ranks is not None
        names = list(dict.fromkeys(host.name for host in self.hostfile.hosts))
        with ThreadPoolExecutor(min(len(names), 64)) as threads:
            there = dict(zip(names, threads.map(self._answers, names), strict=True))
        silent = [name for name in names if not there[name]]
        if not silent:
            return request
        bare = 1 if self.vendor == MPICH else os.cpu_count() or 1
        before, left = self.hostfile.room(bare), self.hostfile.without(silent, bare)
        room = left.room(bare)
        if request.ranks > before:  # more ranks than slots were asked for
            room = request.ranks * room // before
        ranks, least = min(request.ranks, room), request.min_ranks or request.ranks
        told = f"parallel-sgd: no answer from {', '.join(silent)}: "
        if ranks < least:
            write_stderr(
                f"{told}there is room for {ranks} ranks, and at least {least} are wanted "
                "(--min-ranks)"
            )
            return None
        write_stderr(f"{told}going on with {ranks} ranks on the other hosts")
        return replace(request, ranks=ranks, hostfile=left)

    def _answers(self, name: str) -> bool:
        """Whether a host lets mpiexec in: as mpiexec asks it, by ssh or what the user has put in
        its place."""
        if _is_here(name):
            return True
        agent = self._agent()
        options = ["-o", "BatchMode=yes"] if agent == ["ssh"] else []
        try:
            asked = subprocess.run(
                [*agent, *options, name, "true"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # a pipe would wait for whatever ssh leaves running
                stderr=subprocess.DEVNULL,
                timeout=ANSWER_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return asked.returncode == 0

    def _agent(self) -> list[str]:
        options = list(self.mpiexec_options)
        for option, value in pairwise(options):
            if option in _AGENT_OPTIONS:
                return shlex.split(value)
        given = [self.environ[name] for name in _AGENTS if self.environ.get(name)]
        return shlex.split(given[0]) if given else ["ssh"]


@cache
def _is_here(name: str) -> bool:
    """Whether a host is this one, by its name or address. Local, but that names are looked up."""
    own = socket.gethostname()
    if name in ("localhost", own, own.partition(".")[0]):
        return True
    try:
        address = ipaddress.ip_address(socket.gethostbyname(name))
    except (OSError, ValueError):  # nobody knows it here
        return False
    return address.is_loopback or address in {one.address.ip for one in interfaces()}
