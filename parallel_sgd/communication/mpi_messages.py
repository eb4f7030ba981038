"""Messages between ranks of MPI."""

from __future__ import annotations

from contextlib import AbstractContextManager

from mpi4py import MPI

from .messages import Array, Messages, Then
from .watchdog import Watchdog


class MpiMessages(Messages):
    """
    Args:
        comm: whose other messages, if there are any, have other tags.
        watched: bounds every wait.
    """

    def __init__(self, comm: MPI.Intracomm, watched: Watchdog) -> None:
        self._comm, self._watched = comm, watched
        self._requests: list[MPI.Request] = []
        self._then: list[Then] = []

    def send(self, array: Array, peer: int, tag: int, then: Then) -> None:
        self._requests.append(self._comm.Isend(array, peer, tag))
        self._then.append(then)

    def receive(self, array: Array, peer: int, tag: int, then: Then) -> None:
        self._requests.append(self._comm.Irecv(array, peer, tag))
        self._then.append(then)

    def progress(self) -> bool:
        ended = MPI.Request.Testsome(self._requests) if self._requests else None
        if not ended:
            return False
        then = [self._then[i] for i in ended]
        for i in sorted(ended, reverse=True):
            del self._requests[i], self._then[i]
        for call in then:
            call()
        return True

    @property
    def under_way(self) -> int:
        return len(self._requests)

    def watched(self, name: str) -> AbstractContextManager[object]:
        return self._watched(name)
