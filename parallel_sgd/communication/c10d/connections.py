"""TCP connections between every two ranks of a communicator.

Each rank listens, and all ranks learn all offers: addresses, a port and a token. A rank connects to
the lower ranks, and accepts the higher ranks. Both sides of a connection prove their rank by a
token, since the same address may belong to several machines (a bridge for containers), and any
program may connect to a port. The calling rank then confirms: a caller that has given up does not.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import resource
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from ...errors import UserError
from ..network_interfaces import interfaces
from ..phrases import in_words

INTERFACE = "GLOO_SOCKET_IFNAME"
"""PyTorch's environment variable: the network interfaces for its processes, separated by commas."""

CONNECT_TIMEOUT_S = 2.0  #: timeout of a connection to an address, and of each proof
_CONNECTED_S = 60.0  #: longest wait for all connections: all ranks begin together
_TRIES_S = 0.05  #: pause before all addresses of a rank are tried again
_HELLO = struct.Struct("=16sq")  #: the token of the called rank; the calling rank
_CONFIRMED = b"+"  #: last byte of the calling rank, once the called rank has proven its rank
_SPARE_FILES = 32  #: open files left to the program


class Offer(NamedTuple):
    """The way to reach a rank.

    Attributes:
        machine: identifies the rank's machine, or its own network on a machine.
        addresses: IPv4 addresses of the rank's interfaces, loopback addresses first.
        port: the rank listens here on all addresses.
        token: 16 random bytes.
    """

    machine: str
    addresses: tuple[str, ...]
    port: int
    token: bytes

    @classmethod
    def of(cls, values: Sequence[Any]) -> Self:
        return cls(*values)


class Listener:
    """Listens for the higher ranks, from its creation to the end of its `with` block. Local.

    Raises:
        UserError: this rank has no network interface to use.
    """

    def __init__(self) -> None:
        addresses = _addresses()
        self._server = socket.create_server(("", 0), backlog=1024)
        port: int = self._server.getsockname()[1]
        self.offer = Offer(_machine(), addresses, port, secrets.token_bytes(16))
        self._accepted: dict[int, socket.socket] = {}
        self._changed, self._listens = threading.Condition(), True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        with self._changed:
            self._listens = False
            _close(self._accepted)
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._server.close()

    def connect(
        self, rank: int, offers: Sequence[Offer], timeout_s: float
    ) -> dict[int, socket.socket]:
        """Return a connected, non-blocking socket to each other rank.

        Args:
            rank: this rank.
            offers: of all ranks.
            timeout_s: longest wait, in seconds.
        Raises:
            UserError: a rank cannot be reached, or this process may not have as many open files.

        Collective.
        """
        _allow_files(len(offers))
        timeout_s = min(timeout_s, _CONNECTED_S)
        deadline = time.monotonic() + timeout_s
        threading.Thread(target=self._accept, args=(offers,), daemon=True).start()
        connections: dict[int, socket.socket] = {}
        try:
            for peer in range(rank):
                connections[peer] = self._call(rank, peer, offers, deadline)
            higher = range(rank + 1, len(offers))
            with self._changed:
                self._changed.wait_for(
                    lambda: len(self._accepted) == len(higher),
                    max(0.0, deadline - time.monotonic()),
                )
                connections |= self._accepted
                self._accepted.clear()
            if missing := [peer for peer in higher if peer not in connections]:
                raise UserError(
                    f"no connection from {in_words(missing)} to rank {rank} at "
                    f"{', '.join(self.offer.addresses)}, port {self.offer.port}, within "
                    f"{timeout_s:g} s: {INTERFACE} selects another network interface"
                )
        except UserError:
            _close(connections)
            raise
        for connection in connections.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
        return connections

    def _accept(self, offers: Sequence[Offer]) -> None:
        """Accept connections, in a thread, until the end of the `with` block."""
        # bounded: by the end of the `with` block
        while self._listens:
            try:
                # bounded: shutdown ends it
                connection, _ = self._server.accept()
            except OSError:  # the end, or too many open files: the caller waits
                time.sleep(_TRIES_S)
                continue
            # Other programs may connect and say nothing: no rank waits for them.
            threading.Thread(target=self._prove, args=(connection, offers), daemon=True).start()

    def _prove(self, connection: socket.socket, offers: Sequence[Offer]) -> None:
        """Keep the connection of a higher rank, close the connection of any other program."""
        connection.settimeout(CONNECT_TIMEOUT_S)
        rank = self._proven(connection, offers)
        with self._changed:
            if rank is None or not self._listens or rank in self._accepted:
                connection.close()
                return
            self._accepted[rank] = connection
            self._changed.notify()

    def _proven(self, connection: socket.socket, offers: Sequence[Offer]) -> int | None:
        """Return the calling rank, or None for any other program, or a caller that has given up."""
        with contextlib.suppress(OSError):
            # bounded: the connection has a timeout
            hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
            if len(hello) == _HELLO.size:
                token, rank = _HELLO.unpack(hello)
                if token == self.offer.token and 0 <= rank < len(offers):
                    connection.sendall(offers[rank].token)
                    # bounded: the connection has a timeout
                    if connection.recv(len(_CONFIRMED)) == _CONFIRMED:
                        return int(rank)
        return None

    def _call(
        self, rank: int, peer: int, offers: Sequence[Offer], deadline: float
    ) -> socket.socket:
        """Connect to a lower rank."""
        offer, own = offers[peer], offers[rank]
        addresses: Sequence[str] = offer.addresses
        if offer.machine != own.machine:
            addresses = _remote(offer.addresses, own.addresses)
        problem = "it has no IPv4 address for other machines"
        # bounded: by the deadline
        while True:
            for address in addresses:
                try:
                    connection = socket.create_connection(
                        (address, offer.port), timeout=CONNECT_TIMEOUT_S
                    )
                except OSError as error:
                    problem = f"{address}, port {offer.port}: {error}"
                    continue
                with contextlib.suppress(OSError):
                    connection.sendall(_HELLO.pack(offer.token, rank))
                    # bounded: the connection has a timeout
                    if connection.recv(len(own.token), socket.MSG_WAITALL) == own.token:
                        connection.sendall(_CONFIRMED)
                        return connection
                problem = f"{address}, port {offer.port}: another program answers"
                connection.close()
            if not addresses or time.monotonic() > deadline:
                raise UserError(
                    f"rank {rank} cannot reach rank {peer} ({problem}): {INTERFACE} selects "
                    "another network interface"
                )
            time.sleep(_TRIES_S)


def _addresses() -> tuple[str, ...]:
    """Return this host's addresses, loopbacks first; those of the user's interfaces if chosen."""
    found, chosen = interfaces(), os.environ.get(INTERFACE)
    if chosen:
        names = chosen.split(",")
        found = [interface for interface in found if interface.name in names]
        if not found:
            raise UserError(f"{INTERFACE}={chosen!r} must name an interface with an IPv4 address")
    found.sort(key=lambda interface: not interface.loopback)
    return tuple(dict.fromkeys(str(interface.address.ip) for interface in found))


def _remote(addresses: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return the addresses of another machine to try, those in a network of this host first.

    Args:
        own: addresses of this host. The same address there is of a bridge for containers.
    """
    networks = [interface.address.network for interface in interfaces()]
    found = [a for a in map(ipaddress.IPv4Address, addresses) if not a.is_loopback]
    found.sort(key=lambda a: not any(a in network for network in networks))
    return [str(address) for address in found if str(address) not in own]


def _allow_files(count: int) -> None:
    """Raise this process's limit of open files, if `count` more files need a higher limit.

    Raises:
        UserError: the system does not allow as many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UserError(
            f"{count} ranks need connections, and with them this process needs {needed} open "
            f"files, but may have {hard}: raise the limit (ulimit -n)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _close(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
    connections.clear()


def _machine() -> str:
    """Return an identifier of this machine, and of its network: a container has its own."""
    facts = [platform.node()]
    with contextlib.suppress(OSError):
        facts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        facts += [os.readlink("/proc/self/ns/net")]
    return " ".join(facts)
