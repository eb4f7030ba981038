"""Find the responding hosts of a hostfile, and the number of ranks they have room for."""

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

from ..communication.network_interfaces import interfaces
from ..communication.stderr import write_stderr
from .batch_systems import Allocation
from .hosts import MPICH, Hostfile
from .options import Request

#: Longest wait for a host's answer.
ANSWER_TIMEOUT_S = 15.0

#: Variables and options of mpiexec that name a replacement for ssh.
_AGENT_VARIABLES = (
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
        hostfile, batch: the source of the hosts, or None.
        vendor: the vendor of the MPI.
        mpiexec_options: the user's options for mpiexec.
        environ: the user's environment.
    """

    hostfile: Hostfile | None
    batch: Allocation | None
    vendor: str | None
    mpiexec_options: Sequence[str]
    environ: Mapping[str, str]

    @property
    def any_remote(self) -> bool:
        """True if some hosts are, or may be, different from this host. Local."""
        if self.hostfile is None:
            return self.batch is not None and self.batch.hosts != 1
        return any(not _is_this_host(host.name) for host in self.hostfile.hosts)

    def with_reachable_hosts(self, request: Request) -> Request | None:
        """Return the request for the hosts that respond, with at most as many ranks as their slots.

        If the user has requested more ranks than slots, keep the ratio. Return None if fewer ranks
        are left than the user requires. Cost: at most `ANSWER_TIMEOUT_S` for each 64 hosts.
        """
        if self.hostfile is None or not self.any_remote:
            return request
        if any(host.option for host in self.hostfile.hosts):  # not expressible in a list of hosts
            return request
        assert request.ranks is not None
        names = list(dict.fromkeys(host.name for host in self.hostfile.hosts))
        with ThreadPoolExecutor(min(len(names), 64)) as threads:
            reachable = dict(zip(names, threads.map(self._is_reachable, names), strict=True))
        unreachable = [name for name in names if not reachable[name]]
        if not unreachable:
            return request
        bare_slots = 1 if self.vendor == MPICH else os.cpu_count() or 1
        slots_before, remaining = (
            self.hostfile.total_slots(bare_slots),
            self.hostfile.without(unreachable, bare_slots),
        )
        room = remaining.total_slots(bare_slots)
        if request.ranks > slots_before:  # the user has requested more ranks than slots
            room = request.ranks * room // slots_before
        ranks, least = min(request.ranks, room), request.min_ranks or request.ranks
        message = f"parallel-sgd: no answer from {', '.join(unreachable)}: "
        if ranks < least:
            write_stderr(
                f"{message}there is room for {ranks} ranks, and at least {least} are required "
                "(--min-ranks)"
            )
            return None
        write_stderr(f"{message}going on with {ranks} ranks on the remaining hosts")
        return replace(request, ranks=ranks, hostfile=remaining)

    def _is_reachable(self, name: str) -> bool:
        """Return True if a host accepts a remote shell: ssh, or the user's replacement for ssh."""
        if _is_this_host(name):
            return True
        agent = self._agent()
        options = ["-o", "BatchMode=yes"] if agent == ["ssh"] else []
        try:
            reply = subprocess.run(
                [*agent, *options, name, "true"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # a pipe would wait for processes left running by ssh
                stderr=subprocess.DEVNULL,
                timeout=ANSWER_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return reply.returncode == 0

    def _agent(self) -> list[str]:
        options = list(self.mpiexec_options)
        for option, value in pairwise(options):
            if option in _AGENT_OPTIONS:
                return shlex.split(value)
        given = [self.environ[name] for name in _AGENT_VARIABLES if self.environ.get(name)]
        return shlex.split(given[0]) if given else ["ssh"]


@cache
def _is_this_host(name: str) -> bool:
    """Return True if a name or address belongs to this host. Local, except for a name lookup."""
    own = socket.gethostname()
    if name in ("localhost", own, own.partition(".")[0]):
        return True
    try:
        address = ipaddress.ip_address(socket.gethostbyname(name))
    except (OSError, ValueError):  # unknown name
        return False
    return address.is_loopback or address in {interface.address.ip for interface in interfaces()}
