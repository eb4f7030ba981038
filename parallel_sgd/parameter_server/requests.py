"""Requests of workers to a server, received and checked, and the server's answers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import runtime
from ..communication import Endpoint
from ..communication.endpoint import Header, OtherLength, Transfer
from ..kernels import empty_like, memory
from .wire import Kind, Malformed, Message, unpacked

Array = npt.NDArray[Any]

NOTHING: Array = np.empty(0, np.uint8)


@dataclass
class Request:
    """A request of a worker."""

    worker: int
    message: Message
    body: Array
    memory: Array  #: begins with `body`
    transfer: Transfer | None = None
    problem: Malformed | None = None  #: if the request is invalid; `message` then means nothing
    arrived_ns: int = 0  #: arrival of the whole request, by `time.perf_counter_ns` as below
    begun_ns: int = 0  #: start of the server's work
    ended_ns: int = 0  #: end of the server's work
    heartbeat_ns: int = 0  #: the server's latest heartbeat
    staleness: int = 0


class Requests:
    """Receives the messages of workers.

    Args:
        endpoint: to the workers. Its peers are the workers' ranks, ordered by worker number.

    Each call of `arrived` begins to receive a single body, into the most recently used memory. So a
    body from the same machine is still in the cache when the server uses the values. Over a network
    several bodies arrive at the same time. Local. Memory: the largest size of requests held at the
    same time.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._worker_of = {rank: worker for worker, rank in enumerate(endpoint.peers)}
        self._headers: deque[tuple[int, Header]] = deque()  # bodies not yet begun
        self._coming: list[Request] = []  # bodies under way
        self._free: list[Array] = []  # memory for bodies, most recently used last
        #: Time of the latest message from each worker.
        self.heard = [runtime.monotonic()] * len(endpoint.peers)

    def arrived(self) -> list[Request]:
        """Return complete requests and invalid ones, without waiting.

        Raises:
            RanksLost: a rank has failed, on fault-tolerant ranks.
        """
        for rank, header in self._endpoint.arrivals():
            self.heard[self._worker_of[rank]] = runtime.monotonic()
            self._headers.append((rank, header))
        if self._headers:
            self._coming.append(self._begun(*self._headers.popleft()))
        here = [request for request in self._coming if self._is_complete(request)]
        for request in here:
            self._coming.remove(request)
            request.arrived_ns = request.heartbeat_ns = runtime.perf_counter_ns()
        return here

    @property
    def coming(self) -> bool:
        """True if bodies are under way."""
        return bool(self._coming or self._headers)

    def release(self, request: Request) -> None:
        """Reuse the memory of a request's body."""
        if len(request.memory):
            self._free.append(request.memory)

    def _begun(self, rank: int, header: Header) -> Request:
        """Check a header, and begin to receive its body."""
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
        """Return memory for a body: the most recently used of sufficient size, or new."""
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
    def _is_complete(request: Request) -> bool:
        try:
            return request.transfer is None or request.transfer.done()
        except OtherLength:
            announced = request.message.body
            request.problem = Malformed(
                f"body={announced} of this message is not the length received"
            )
            return True


class Answers:
    """Sends messages to workers without waiting for delivery.

    Args:
        endpoint: to the workers. Its peers are the workers' ranks, ordered by worker number.

    Local. Memory: the vectors being sent from at the same time (two as a rule, at most one per
    worker), and a vector to write to.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._transfers: list[tuple[Transfer, Array | None]] = []  # each with the vector it reads
        self._vectors: list[Array] = []  # all vectors seen so far

    def send(
        self,
        worker: int,
        message: Message,
        body: Array | None = None,
        *,
        of: Array | None = None,
    ) -> None:
        """Begin to send a message.

        Args:
            body: uint8. The caller leaves the body alone until delivery.
            of: the vector whose memory the body is. None if the body has memory of its own.
        """
        rank = self._endpoint.peers[worker]
        self._transfers.append((self._endpoint.send(rank, message.packed(), body), of))

    @property
    def sending(self) -> bool:
        """True if messages are under way."""
        return bool(self._transfers)

    def move(self) -> None:
        """Drop the transfers that have completed."""
        self._transfers = [(t, of) for t, of in self._transfers if not t.done()]

    def unread(self, vector: Array) -> Array:
        """Return a vector that may be written to.

        Returns:
            `vector` itself, unless a transfer still reads it. Otherwise another vector [n] of the
            same dtype, with any values.
        """
        self.move()
        if not any(vector is known for known in self._vectors):
            self._vectors.append(vector)
        read = {id(of) for _, of in self._transfers}
        if id(vector) not in read:
            return vector
        free = next((known for known in self._vectors if id(known) not in read), None)
        if free is None:
            free = empty_like(vector, vector.size)
            self._vectors.append(free)
        return free

    def finish(self) -> None:
        """Wait until all messages are sent."""
        for transfer, _ in self._transfers:
            self._endpoint.finish([transfer], "answers to workers")
        self._transfers.clear()
