"""Messages of a server to its workers, and the memory behind them."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ..communication import Endpoint
from ..communication.endpoint import Transfer
from ..kernels import empty_like
from .wire import Message

Array = npt.NDArray[Any]


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
