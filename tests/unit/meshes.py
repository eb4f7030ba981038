"""Meshes and communicators of a few ranks in one process, connected by pairs of sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from limits import patience

from parallel_sgd.communication import Watchdog
from parallel_sgd.communication.c10d.communicator import C10dCommunicator
from parallel_sgd.communication.c10d.mesh import Mesh

SMALL = 4096  #: size of the sockets' buffers, in bytes; the system makes it a little larger


def connections(size: int) -> list[dict[int, Any]]:
    """A socket to each other rank, by rank."""
    found: list[dict[int, Any]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            pair = socket.socketpair()
            for end in pair:
                end.setblocking(False)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
            found[low][high], found[high][low] = pair
    return found


def meshes(size: int, **options: Any) -> list[Mesh]:
    # Other numbers than the ranks', so that a text with the wrong one is seen.
    world_ranks = [10 + rank for rank in range(size)]
    return [Mesh(k, ends, world_ranks, **options) for k, ends in enumerate(connections(size))]


def until(condition: Callable[[], object], driven: Sequence[Mesh], seconds: float = 10) -> None:
    """Drive meshes in turn until something has come."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds * patience(), "it never comes"
        for mesh in driven:
            mesh.drive()


def in_threads(bodies: Iterable[Callable[[], Any]]) -> list[Any]:
    """What functions return that run at the same time, or their errors."""
    bodies = list(bodies)
    results: list[Any] = ["it never ends"] * len(bodies)

    def run(number: int) -> None:
        try:
            results[number] = bodies[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30 * patience())
    return results


def on_ranks(size: int, body: Callable[[C10dCommunicator], Any]) -> list[Any]:
    """What a body returns on ranks that are threads, or its errors, by rank."""
    ended: list[int] = []

    def run(mesh: Mesh) -> Any:
        watched = Watchdog(20 * patience(), mesh.rank, lambda: ended.append(mesh.rank))
        comm = C10dCommunicator(mesh, watched)
        try:
            return body(comm)
        finally:
            comm.close()

    results = in_threads([lambda mesh=mesh: run(mesh) for mesh in meshes(size)])  # type: ignore[misc]
    assert ended == [] and len(results) == size
    return results
