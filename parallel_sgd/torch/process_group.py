"""PyTorch's own process group beside MPI, for whatever in a program calls torch.distributed.

PyTorch's ranks find each other by an address. MPI's know each other already, so they agree on one
by MPI: rank 0 names the addresses that its host has, and all others try which of them they reach.
What they reach it from is the network interface that gloo is told to use, for gloo by itself asks a
name service for the host's name, which a cluster's node or a container may not have.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from ..communication import Communicator, checked_timeout
from ..errors import UserError
from ..validation import instance, line_of
from .refusals import require_not_fault_tolerant

INTERFACE = "GLOO_SOCKET_IFNAME"  #: the variable that gloo reads
LOOPBACK = "127.0.0.1"
TRY_S = 2.0  #: for a connection to one address
SIOCGIFADDR = 0x8915  #: Linux's call for an interface's address


def init_process_group(
    comm: Communicator, *, backend: str = "gloo", timeout_s: float | None = None
) -> None:
    """`torch.distributed.init_process_group` over the ranks of `comm`, with the same numbers.

    Args:
        comm: the ranks: every process of them is to have one process group.
        backend: PyTorch's, gloo among them: "gloo", or "cpu:gloo,cuda:nccl".
        timeout_s: longest wait in a collective of the process group, in seconds; `comm.timeout_s`
            if not given.
    Raises:
        SharedError: on all ranks, with one line: there is a process group, ranks do not reach
            each other, or they survive each other (`run --survive`).

    Sets GLOO_SOCKET_IFNAME in this process's environment, unless the user has set it: then it says
    which interface counts. Only IPv4. `torch.distributed.destroy_process_group()` is the user's to
    call. Collective. Cost: some milliseconds, and for each address that cannot be reached 2 s.

        comm = psgd.Communicator.world()
        psgd.torch.init_process_group(comm)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
    """
    instance("comm", comm, Communicator, "Communicator.world()")
    seconds = comm.together(lambda: _checked(comm, timeout_s))
    address, own = _rendezvous(comm)
    before = os.environ.get(INTERFACE)
    os.environ.setdefault(INTERFACE, _interface_of(own))
    timeout = timedelta(seconds=seconds)
    try:
        # What one rank lacks is known before the others wait for it.
        comm.together(lambda: _require_device(os.environ[INTERFACE]))
        store, port = None, 0
        if comm.rank == 0:
            store = dist.TCPStore(
                address, 0, comm.size, True, timeout=timeout, wait_for_workers=False
            )
            port = store.port
        port = comm.allgather_object(port)[0]

        def connected() -> None:
            with _as_user_error(f"does not reach rank 0 at {address}:{port}"):
                shared = store or dist.TCPStore(address, port, comm.size, False, timeout=timeout)
                dist.init_process_group(
                    backend, store=shared, rank=comm.rank, world_size=comm.size, timeout=timeout
                )

        comm.together(connected)
    except UserError:
        if before is None:
            os.environ.pop(INTERFACE, None)
        raise


def _checked(comm: Communicator, timeout_s: float | None) -> float:
    require_not_fault_tolerant(comm, "init_process_group")
    if dist.is_initialized():
        raise UserError("init_process_group: torch.distributed has a process group already")
    return checked_timeout(comm.timeout_s if timeout_s is None else timeout_s)


def _rendezvous(comm: Communicator) -> tuple[str, str]:
    """An address of rank 0 that all ranks reach, and this rank's own that it does so from.

    Collective.
    """
    with contextlib.ExitStack() as stack:
        offer = stack.enter_context(_listening()) if comm.rank == 0 else None
        addresses, port, token = comm.allgather_object(offer)[0]
        comm.raise_together(
            f"init_process_group: {INTERFACE}={os.environ.get(INTERFACE)} has no IPv4 address"
            if comm.rank == 0 and not addresses
            else None
        )
        reached = {}
        for address in addresses:
            own = address if comm.rank == 0 else _probe(address, port, token)
            if own is not None:
                reached[address] = own
        everywhere = comm.allgather_object([*reached])
    common = [address for address in addresses if all(address in has for has in everywhere)]
    listed = ", ".join(addresses)
    missing = None if reached else f"init_process_group: cannot reach rank 0 at {listed}"
    comm.raise_together(missing)
    comm.raise_together(
        None
        if common
        else f"init_process_group: no address of rank 0 can be reached from all ranks: {listed}; "
        f"set {INTERFACE} to the interface that they share"
    )
    return common[0], reached[common[0]]


@contextlib.contextmanager
def _listening() -> Iterator[tuple[list[str], int, bytes]]:
    """At rank 0: its addresses, and the port where it answers with a token, until the end."""
    token = secrets.token_bytes(16)
    with socket.create_server(("", 0), backlog=1024) as server:
        thread = threading.Thread(target=_answer, args=(server, token), daemon=True)
        thread.start()
        yield _addresses(), server.getsockname()[1], token
        server.shutdown(socket.SHUT_RDWR)  # which ends `accept`
        thread.join()


def _answer(server: socket.socket, token: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(token)


def _probe(address: str, port: int, token: bytes) -> str | None:
    """This rank's address as it reaches rank 0 at one of its own; None where it does not."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((address, port), timeout=TRY_S) as connection,
    ):
        received = connection.recv(len(token), socket.MSG_WAITALL)
        own: str = connection.getsockname()[0]
        return own if received == token else None  # or something else listens there
    return None


def _addresses() -> list[str]:
    """Of this host, the loopback's first; of the user's interface alone where one is given."""
    every = _interfaces()
    chosen = os.environ.get(INTERFACE)
    if chosen is not None:
        first = chosen.split(",")[0]
        return [address for name, address in every.items() if name == first]
    return sorted(dict.fromkeys(every.values()), key=lambda a: not a.startswith("127."))


def _interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = array.array("B", struct.pack("256s", name.encode()))
                fcntl.ioctl(asked, SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(request[20:24].tobytes())
    return found


def _interface_of(address: str) -> str:
    """The name of the interface that has an address; the loopback's has many."""
    by_address = {own: name for name, own in _interfaces().items()}
    usual = by_address.get(LOOPBACK, "lo") if address.startswith("127.") else ""
    return by_address.get(address, usual)


def _require_device(interface: str) -> None:
    with _as_user_error(f"gloo cannot use {INTERFACE}={interface}"):
        dist.ProcessGroupGloo.create_device(interface=interface)


@contextlib.contextmanager
def _as_user_error(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:  # DistError is a RuntimeError
        reason = line_of(error).partition(" Exception raised from")[0]
        raise UserError(f"init_process_group: {what}: {reason}") from error
