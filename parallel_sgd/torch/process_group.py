"""PyTorch's process group alongside MPI, for programs that use torch.distributed.

PyTorch's ranks find each other through an address; MPI ranks are already connected. So the ranks
agree on an address through MPI: rank 0 lists its host's addresses, and every rank tries to connect
to each. The interface of the successful connection is given to gloo. By default gloo would look up
the host's name in a name service, where nodes of a cluster and containers may be missing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from ..communication import Communicator, checked_timeout, interfaces
from ..errors import UserError
from ..validation import instance, line_of
from .refusals import require_not_fault_tolerant

INTERFACE = "GLOO_SOCKET_IFNAME"  #: gloo's environment variable
LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT_S = 2.0  #: timeout of a connection to an address

_own_variables: dict[str, str] = {}  #: environment variables that an earlier process group has set


def init_process_group(
    comm: Communicator, *, backend: str = "gloo", timeout_s: float | None = None
) -> None:
    """Call `torch.distributed.init_process_group` for the ranks of `comm`, with equal rank numbers.

    Args:
        comm: the ranks of the process group.
        backend: PyTorch's backend, including gloo: "gloo", or "cpu:gloo,cuda:nccl".
        timeout_s: longest wait in a collective of the process group, in seconds; default
            `comm.timeout_s`.
    Raises:
        SharedError: on all ranks, with one line: a process group exists already, ranks cannot
            connect to each other, or the ranks are fault-tolerant (`run --survive`).

    Sets GLOO_SOCKET_IFNAME in this process's environment, unless already set; a variable set by the
    user selects the interface. Also sets torchrun's variables, unless already set: RANK,
    WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. So trainers such as
    Hugging Face's, Lightning and Accelerate know their rank under mpiexec. The port belongs to the
    process group's own store, which listens on rank 0.

    IPv4 only. The user calls `torch.distributed.destroy_process_group()`. Collective. Cost: some
    milliseconds, and 2 s for each unreachable address.

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
        # A failure of one rank is known to all before any rank waits in PyTorch.
        comm.together(lambda: _require_device(os.environ[INTERFACE]))
        store, port = None, 0
        if comm.rank == 0:
            store = dist.TCPStore(
                address, 0, comm.size, True, timeout=timeout, wait_for_workers=False
            )
            port = store.port
        port = comm.allgather_object(port)[0]

        def connected() -> None:
            with _as_user_error(f"cannot reach rank 0 at {address}:{port}"):
                shared = store or dist.TCPStore(address, port, comm.size, False, timeout=timeout)
                dist.init_process_group(
                    backend, store=shared, rank=comm.rank, world_size=comm.size, timeout=timeout
                )

        comm.together(connected)
        _set_variables(comm, address, port)
    except UserError:
        if before is None:
            os.environ.pop(INTERFACE, None)
        raise


def _set_variables(comm: Communicator, address: str, port: int) -> None:
    """Set torchrun's variables, except those that somebody else has set. Collective."""
    values = {
        "RANK": comm.rank,
        "WORLD_SIZE": comm.size,
        "LOCAL_RANK": comm.local_rank,
        "LOCAL_WORLD_SIZE": comm.local_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    for name, value in values.items():
        if os.environ.get(name) in (None, _own_variables.get(name)):
            os.environ[name] = _own_variables[name] = str(value)


def _checked(comm: Communicator, timeout_s: float | None) -> float:
    require_not_fault_tolerant(comm, "init_process_group")
    if dist.is_initialized():
        raise UserError("init_process_group: torch.distributed has a process group already")
    return checked_timeout(comm.timeout_s if timeout_s is None else timeout_s)


def _rendezvous(comm: Communicator) -> tuple[str, str]:
    """Return an address of rank 0 reachable from all ranks, and this rank's own address for that
    connection.

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
        gathered = comm.allgather_object([*reached])
    common = [address for address in addresses if all(address in has for has in gathered)]
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
    """Listen on rank 0 for a `with` block: yield its addresses, the port, and a token.

    A thread answers each connection with the token, until the block ends.
    """
    token = secrets.token_bytes(16)
    with socket.create_server(("", 0), backlog=1024) as server:
        thread = threading.Thread(target=_answer, args=(server, token), daemon=True)
        thread.start()
        yield _addresses(), server.getsockname()[1], token
        server.shutdown(socket.SHUT_RDWR)  # ends `accept`
        # bounded: a thread that the line before ends
        thread.join()


def _answer(server: socket.socket, token: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            # bounded: shutdown ends it
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(token)


def _probe(address: str, port: int, token: bytes) -> str | None:
    """Return this rank's own address in a connection to rank 0; None if the connection fails."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as connection,
    ):
        # bounded: the connection has a timeout
        received = connection.recv(len(token), socket.MSG_WAITALL)
        own: str = connection.getsockname()[0]
        return own if received == token else None  # None: another program listens there
    return None


def _addresses() -> list[str]:
    """Return this host's addresses, the loopback's first; only the user's interface if set."""
    every = _interfaces()
    chosen = os.environ.get(INTERFACE)
    if chosen is not None:
        first = chosen.split(",")[0]
        return [address for name, address in every.items() if name == first]
    return sorted(dict.fromkeys(every.values()), key=lambda a: not a.startswith("127."))


def _interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface, by name."""
    return {interface.name: str(interface.address.ip) for interface in interfaces()}


def _interface_of(address: str) -> str:
    """Return the name of the interface with an address; the loopback has many addresses."""
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
