"""Hosts that are there: made, given to whoever measures or tests on them, and removed."""

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
from ...launcher.cores import usable_cores
from ...launcher.mpiexec import bound_mpi
from ...launcher.run import THREAD_VARIABLES
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

MOST = 200  #: hosts: each has one byte of the address


@dataclass(frozen=True)
class EmulatedHosts:
    """Hosts that are there, as `emulated_hosts` makes them.

    Attributes:
        names: of the hosts and of their namespaces.
        switch: the namespace of the bridge, in which mpiexec has to be started.
        folder: with the hostfile and the agent.
        wiring: what the MPI has to be told.
        slots: ranks that a host is for.
    """

    names: tuple[str, ...]
    switch: str
    folder: Path
    mpi_settings: MpiSettings
    slots: int = 1

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of each host."""
        return tuple(address(i + 1) for i in range(len(self.names)))

    @property
    def inside(self) -> list[str]:
        """What comes before a command to start it where the hosts can be reached."""
        return ["ip", "netns", "exec", self.switch]

    def on(self, host: int) -> list[str]:
        """What comes before a command to start it on a host, with its network and its name."""
        name = self.names[host]
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", SETUP, name]

    @property
    def hostfile(self) -> str:
        """The text of a hostfile, in the MPI's dialect."""
        lines = [self.mpi_settings.line.format(name=name, slots=self.slots) for name in self.names]
        return "".join(f"{line}\n" for line in lines)

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a plain `mpiexec -hostfile FILE`, of this Python's MPI, works.

        The cores are shared among all ranks, one thread each at least, unless the user has set how
        many.
        """
        threads = str(max(1, usable_cores() // (len(self.names) * self.slots)))
        own = {name: os.environ.get(name, threads) for name in THREAD_VARIABLES}
        path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        return {**self.mpi_settings.environment, **own, "PATH": os.pathsep.join(path)}

    @property
    def run_options(self) -> list[str]:
        """Options of `parallel-sgd run` that place one rank on each slot."""
        return [
            *("--hostfile", str(self.folder / "hosts")),
            f"--mpiexec-options={shlex.join(self.mpi_settings.options)}",
        ]

    def cut(self, host: int) -> None:
        """Take a host's link down: nothing gets through, and nobody is told."""
        call(["ip", "-n", self.switch, "link", "set", self._port(host), "down"])

    def mend(self, host: int) -> None:
        """Take it up again."""
        call(["ip", "-n", self.switch, "link", "set", self._port(host), "up"])

    def _port(self, host: int) -> str:
        return port(range(len(self.names))[host])


@contextmanager
def emulated_hosts(count: int, rate: float, slots: int = 1) -> Iterator[EmulatedHosts]:
    """Make hosts; at the end, also after an error or a signal, remove them and end what runs there.

    Those of a process that was killed are removed by the next one.

    Args:
        count: how many.
        rate: bits a second of every link, in each direction; `math.inf`: no limit.
        slots: ranks that each host is for.

    Raises:
        UserError: the machine, or this process, lacks something that it takes.
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
