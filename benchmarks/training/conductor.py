"""Starts both sides on the same hosts, and lets the sides play in turn.

A side's processes stay up: a waiting side blocks on a socket and takes no time. Sockets are files,
visible in every network namespace; their traffic is not on the links.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from parallel_sgd import UserError

START_S = 120  #: for all ranks of a side to be up
ANSWER_S = 900  #: for a command to be done
END_S = 10  #: for a process to end, before it is made to

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # of PyTorch and its MKL, too
    "OPENBLAS_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of hosts that no name service knows
}

INTERFACE = "GLOO_SOCKET_IFNAME"

SIDES = {"ours": "our ranks", "peer": "PyTorch's processes"}


class Hosts(Protocol):
    """The part of `emulated_hosts` that a conductor needs."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def addresses(self) -> Sequence[str]: ...
    @property
    def inside(self) -> list[str]: ...
    @property
    def run_options(self) -> list[str]: ...
    def on(self, host: int) -> list[str]: ...


class Here:
    """Ranks of this machine: nothing comes before their commands.

    The ranks have no limited links, and MPI's ranks share memory.
    """

    inside: list[str] = []  # noqa: RUF012
    run_options: list[str] = []  # noqa: RUF012

    def __init__(self, count: int) -> None:
        self.names, self.addresses = ("this machine",) * count, ("127.0.0.1",) * count

    def on(self, host: int) -> list[str]:
        return []


class Conductor:
    """Both sides, each a list of connections by rank."""

    def __init__(self, connections: dict[str, list[Any]]) -> None:
        self.connections = connections

    def all(self, side: str, command: str, **options: Any) -> list[dict[str, Any]]:
        """Send a command to all ranks of a side; return the answers by rank.

        Raises:
            UserError: a rank has ended, or takes too long.
        """
        return self._ask(side, self.connections[side], command, options)

    def first(self, side: str, command: str, **options: Any) -> dict[str, Any]:
        """Send a command to the first rank alone."""
        return self._ask(side, self.connections[side][:1], command, options)[0]

    def _ask(
        self, side: str, connections: list[Any], command: str, options: dict[str, Any]
    ) -> list[dict[str, Any]]:
        try:
            for connection in connections:
                connection.write(json.dumps([command, options]) + "\n")
                connection.flush()
            answers = [connection.readline() for connection in connections]
        except TimeoutError:
            raise UserError(f"{SIDES[side]} took longer than {ANSWER_S} s: {command}") from None
        except OSError:
            answers = [""]
        if not all(answers):
            raise UserError(f"{SIDES[side]} ended in {command}; what they said is above")
        return [json.loads(answer) for answer in answers]


@contextmanager
def conducted(
    hosts: Hosts,
    sides: Iterable[str],
    package: str = "training",
    *,
    played_by: Mapping[str, str] | None = None,
    interface: str = "eth0",
) -> Iterator[Conductor]:
    """Start sides on hosts, a process on each host, for a `with` block.

    Args:
        package: of the sides' modules, `ours` and `peer`.
        played_by: replaces a side's module.
        interface: of gloo's network.
    Raises:
        UserError: a side did not come up.
    """
    count = len(hosts.names)
    with ExitStack() as stack:
        path = str(Path(stack.enter_context(tempfile.TemporaryDirectory()), "socket"))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(2 * count)
        listener.settimeout(1)
        connections = {}
        for side in sides:
            module = f"benchmarks.{package}.{(played_by or {}).get(side, side)}"
            processes = [
                _started(stack, command, interface)
                for command in _commands(side, module, hosts, path)
            ]
            connections[side] = _met(stack, listener, side, processes, count)
        yield Conductor(connections)


def _commands(side: str, module: str, hosts: Hosts, path: str) -> list[list[str]]:
    python = [sys.executable, "-m"]
    count = len(hosts.names)
    if side == "ours":
        run = [*python, "parallel_sgd", "run", "-n", str(count), *hosts.run_options]
        return [[*hosts.inside, *run, "-m", module, path]]
    peer = [*python, module]
    options = [str(count), hosts.addresses[0], path]
    return [[*hosts.on(i), *peer, str(i), *options] for i in range(count)]


def _started(stack: ExitStack, command: list[str], interface: str) -> subprocess.Popen[bytes]:
    environ = {**os.environ, **ENVIRONMENT, INTERFACE: interface}
    process = stack.enter_context(subprocess.Popen(command, env=environ))
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with a closed connection, if the process hangs."""
    for stop in (process.terminate, process.kill):
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            stop()


def _met(
    stack: ExitStack,
    listener: socket.socket,
    side: str,
    processes: list[subprocess.Popen[bytes]],
    count: int,
) -> list[Any]:
    """Wait for all ranks of a side; return their connections."""
    by_rank: dict[int, Any] = {}
    until = time.monotonic() + START_S
    while len(by_rank) < count:
        if any(process.poll() is not None for process in processes) or time.monotonic() > until:
            raise UserError(f"{SIDES[side]} did not start; what they said is above")
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        stack.enter_context(connection)
        connection.settimeout(ANSWER_S)
        lines = stack.enter_context(connection.makefile("rw"))
        by_rank[json.loads(lines.readline())["rank"]] = lines
    return [by_rank[rank] for rank in range(count)]
