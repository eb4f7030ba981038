"""Make emulated hosts, and remove them again."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...errors import UserError
from ...launcher import THREAD_VARIABLES, bound_mpi, usable_cores
from .links import address, commands, port, require_rate
from .mpi import AGENT, MpiSettings, mpi_settings
from .namespaces import (
    PREFIX,
    SETUP,
    call,
    exit_on_signals,
    names_of,
    remove,
    remove_leftovers,
    require,
    signals_blocked,
)

MOST = 200  #: hosts: each is a byte of the address


@dataclass(frozen=True)
class EmulatedHosts:
    """Hosts made by `emulated_hosts`.

    Attributes:
        names: the names of the hosts and of their namespaces.
        switch: the namespace of the bridge; mpiexec has to be started there.
        folder: the folder of the hostfile and the agent.
        mpi_settings: the settings of the MPI.
        slots: the number of ranks for each host.
    """

    names: tuple[str, ...]
    switch: str
    folder: Path
    mpi_settings: MpiSettings
    slots: int = 1

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of each host."""
        return tuple(address(i + 1) for i in range(len(self.names)))

    @property
    def inside(self) -> list[str]:
        """The words before a command that has to reach the hosts."""
        return ["ip", "netns", "exec", self.switch]

    def on(self, host: int) -> list[str]:
        """Return the words before a command to run on a host, with the host's network and name."""
        name = self.names[host]
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", SETUP, name]

    @property
    def hostfile(self) -> str:
        """The text of a hostfile, in the MPI's dialect."""
        lines = [self.mpi_settings.line.format(name=name, slots=self.slots) for name in self.names]
        return "".join(f"{line}\n" for line in lines)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a plain `mpiexec -hostfile FILE` of this Python's MPI.

        The cores are shared among all ranks, with at least a thread each, unless the user has set
        the number of threads.
        """
        threads = str(max(1, usable_cores() // (len(self.names) * self.slots)))
        own = {name: os.environ.get(name, threads) for name in THREAD_VARIABLES}
        path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        return {**self.mpi_settings.environment, **own, "PATH": os.pathsep.join(path)}

    @property
    def run_options(self) -> list[str]:
        """Options of `parallel-sgd run` that place a rank on each slot."""
        return [
            *("--hostfile", str(self.folder / "hosts")),
            f"--mpiexec-options={shlex.join(self.mpi_settings.options)}",
        ]

    def cut(self, host: int) -> None:
        """Take a host's link down: no message arrives, and no program is notified."""
        call(["ip", "-n", self.switch, "link", "set", self._port(host), "down"])

    def mend(self, host: int) -> None:
        """Take a host's link up again."""
        call(["ip", "-n", self.switch, "link", "set", self._port(host), "up"])

    def _port(self, host: int) -> str:
        return port(range(len(self.names))[host])


@contextmanager
def emulated_hosts(count: int, rate: float, slots: int = 1) -> Iterator[EmulatedHosts]:
    """Make hosts; at the end, also after an error or a signal, end their processes and remove them.

    Hosts of a killed process are removed by the next call.

    Args:
        count: the number of hosts.
        rate: bits per second of every link, in each direction; `math.inf`: no limit.
        slots: the number of ranks for each host.

    Raises:
        UserError: the machine, or this process, lacks a requirement.
    """
    if not 1 <= count <= MOST:
        raise UserError(f"hosts={count} of an emulated cluster must be 1 to {MOST}")
    if slots < 1:
        raise UserError(f"slots={slots} of emulated hosts must be at least 1")
    require_rate(rate)
    require()
    mpi = bound_mpi()
    switch, names = names_of(os.getpid(), count)
    with exit_on_signals():
        remove_leftovers()
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}-{os.getpid()}-"))
        try:
            hosts = EmulatedHosts(names, switch, folder, mpi_settings(mpi, folder), slots)
            (folder / "agent").write_text(AGENT)
            (folder / "agent").chmod(0o755)
            (folder / "hosts").write_text(hosts.hostfile)
            for command in commands(switch, names, rate):
                call(command)
            yield hosts
        finally:
            with signals_blocked():
                remove((switch, *names))
                shutil.rmtree(folder, ignore_errors=True)
