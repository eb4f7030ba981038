"""What workers ask a server for: their messages, checked, until all of each is here."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..communication import Endpoint
from ..communication.endpoint import Header, OtherLength, Transfer
from ..kernels import memory
from .wire import Kind, Malformed, Message, unpacked

Array = npt.NDArray[Any]

NOTHING: Array = np.empty(0, np.uint8)


@dataclass
class Request:
    """What a worker has asked for."""

    worker: int
    message: Message
    body: Array
    memory: Array  #: that `body` is the beginning of
    transfer: Transfer | None = None
    problem: Malformed | None = None  #: why it is none; then `message` says nothing
    came_ns: int = 0  #: when all of it was here, by `time.perf_counter_ns` as the others
    begun_ns: int = 0  #: when the server began to work on it
    ended_ns: int = 0  #: when it had done so
    heartbeat_ns: int = 0  #: when the server last said that it is there
    staleness: int = 0


class Requests:
    """Receives what workers send.

    Args:
        endpoint: to the workers, whose ranks are its peers in the order of their numbers.

    Bodies are begun one after the other, so that one that is here at once (inside a machine) is
    still in the cache when it is used, and in memory that was used just before; over a network
    several come at the same time. Local. Keeps as much memory as requests have taken at once.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._worker_of = {rank: worker for worker, rank in enumerate(endpoint.peers)}
        self._headers: deque[tuple[int, Header]] = deque()  # whose bodies are not
        self._coming: list[Request] = []  # whose bodies are under way
        self._free: list[Array] = []  # memory for bodies, the one used last at the end
        #: When each worker was last heard of.
        self.heard = [time.monotonic()] * len(endpoint.peers)

    def arrived(self) -> list[Request]:
        """Those that are all here by now, and what is none; does not wait.

        Raises:
            RanksLost: a rank has died, where the others survive that.
        """
        for rank, header in self._endpoint.arrivals():
            self.heard[self._worker_of[rank]] = time.monotonic()
            self._headers.append((rank, header))
        if self._headers:
            self._coming.append(self._begun(*self._headers.popleft()))
        here = [request for request in self._coming if self._here(request)]
        for request in here:
            self._coming.remove(request)
            request.came_ns = request.heartbeat_ns = time.perf_counter_ns()
        return here

    @property
    def coming(self) -> bool:
        """Whether bodies are under way."""
        return bool(self._coming or self._headers)

    def release(self, request: Request) -> None:
        """Its body is not needed any more."""
        if len(request.memory):
            self._free.append(request.memory)

    def _begun(self, rank: int, header: Header) -> Request:
        """A header is here: check it, and receive the body."""
        worker = self._worker_of[rank]
        try:
            message = unpacked(header)
            here = self._endpoint.next_body_length(rank)
            if here not in (message.body, 0):
                raise Malformed(f"body={message.body} of this message must be {here}")
            if message.kind >= Kind.MODEL:
                raise Malformed(f"a worker cannot send {message.kind.name}")
            room = self._memory(message.body)
        except Malformed as error:
            self._endpoint.discard(rank)
            return Request(worker, Message(kind=Kind.PULL), NOTHING, NOTHING, problem=error)
        body = room[: message.body]
        transfer = self._endpoint.receive(rank, body) if message.body else None
        return Request(worker, message, body, room, transfer)

    def _memory(self, size: int) -> Array:
        """Room for a body: what was used last and is large enough, or else new."""
        if size == 0:
            return NOTHING
        for at in reversed(range(len(self._free))):
            if len(self._free[at]) >= size:
                return self._free.pop(at)
        del self._free[:1]  # too small
        try:
            return memory.empty(size, np.dtype(np.uint8))
        except MemoryError:
            raise Malformed(f"body={size} is more than there is memory for") from None

    @staticmethod
    def _here(request: Request) -> bool:
        try:
            return request.transfer is None or request.transfer.done()
        except OtherLength:
            announced = request.message.body
            request.problem = Malformed(f"body={announced} of this message is not what has come")
            return True
