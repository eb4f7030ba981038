"""What workers ask a server for: their messages, checked, until all of each is here."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..communication import Endpoint
from ..communication.endpoint import OtherLength, Transfer
from ..kernels import memory
from .wire import Kind, Malformed, Message, unpacked

Array = npt.NDArray[Any]


@dataclass
class Request:
    """What a worker has asked for.

    Attributes:
        problem: why it is none; then `message` says nothing.
        came: when all of it was here; `begun`, `ended`: when the server worked on it.
        told: when the worker last heard from the server.
    """

    worker: int
    message: Message
    body: Array
    transfer: Transfer | None = None
    problem: Malformed | None = None
    came: float = 0.0
    begun: float = 0.0
    ended: float = 0.0
    told: float = 0.0
    staleness: int = 0


class Requests:
    """Receives what workers send.

    Args:
        endpoint: to the workers, whose ranks are its peers in the order of their numbers.

    Attributes:
        heard: when each worker was last heard of, by `time.monotonic`.

    Local. Keeps memory for the largest request of every worker so far.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._worker_of = {rank: worker for worker, rank in enumerate(endpoint.peers)}
        self._coming: list[Request] = []  # whose bodies are under way
        self._bodies = [np.empty(0, np.uint8)] * len(endpoint.peers)  # grown as they are needed
        self.heard = [time.monotonic()] * len(endpoint.peers)

    def arrived(self) -> list[Request]:
        """Those that are all here by now, and what is none; does not wait.

        Raises:
            PeerLost: a worker has died. Nothing else is lost by that.
        """
        self._coming += [self._begun(*each) for each in self._endpoint.arrivals()]
        here = [request for request in self._coming if self._here(request)]
        for request in here:
            self._coming.remove(request)
            request.came = request.told = time.perf_counter()
        return here

    @property
    def coming(self) -> bool:
        """Whether bodies are under way."""
        return bool(self._coming)

    def forget(self, worker: int) -> None:
        """Nothing more comes from a worker."""
        self._coming = [request for request in self._coming if request.worker != worker]

    def _begun(self, rank: int, header: Array) -> Request:
        """A header is here: check it, and receive the body."""
        worker = self._worker_of[rank]
        self.heard[worker] = time.monotonic()
        try:
            message = unpacked(header)
            here = self._endpoint.body_here(rank)
            if here not in (message.body, 0):
                raise Malformed(f"body={message.body} of this message must be {here}")
            if message.kind >= Kind.MODEL:
                raise Malformed(f"a worker cannot send {message.kind.name}")
            body = self._body(worker, message.body)
        except Malformed as error:
            self._endpoint.discard(rank)
            return Request(worker, Message(kind=Kind.PULL), self._bodies[worker], problem=error)
        transfer = self._endpoint.receive(rank, body) if message.body else None
        return Request(worker, message, body, transfer)

    def _body(self, worker: int, size: int) -> Array:
        """Memory for a body; a worker's next one takes it over."""
        body = self._bodies[worker]
        if len(body) < size:
            try:
                body = self._bodies[worker] = memory.empty(size, np.dtype(np.uint8))
            except MemoryError:
                raise Malformed(f"body={size} is more than there is memory for") from None
        return body[:size]

    @staticmethod
    def _here(request: Request) -> bool:
        try:
            return request.transfer is None or request.transfer.done()
        except OtherLength:
            announced = request.message.body
            request.problem = Malformed(f"body={announced} of this message is not what has come")
            return True
