"""What a server sends to workers, and the memory that it is being sent from."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ..communication import Endpoint
from ..communication.endpoint import Transfer
from ..kernels import empty_like
from .wire import Message

Array = npt.NDArray[Any]


class Answers:
    """Sends messages to workers; nobody waits for them.

    Args:
        endpoint: to the workers, whose ranks are its peers in the order of their numbers.

    Local. Keeps as many vectors as have been sent from at once: two as a rule, and one for every
    worker at most, beside the one that is not.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._sending: list[tuple[Transfer, Array | None]] = []  # and what each is sent from
        self._vectors: list[Array] = []  # that have been in use

    def send(
        self,
        worker: int,
        message: Message,
        body: Array | None = None,
        *,
        of: Array | None = None,
    ) -> None:
        """Begin to send.

        Args:
            body: uint8, left alone until it has been sent.
            of: the vector whose memory that is, where it is not the message's own.
        """
        rank = self._endpoint.peers[worker]
        self._sending.append((self._endpoint.send(rank, message.packed(), body), of))

    @property
    def going(self) -> bool:
        """Whether messages are under way."""
        return bool(self._sending)

    def move(self) -> None:
        """Forget what has been sent by now."""
        self._sending = [(t, of) for t, of in self._sending if not t.done()]

    def unread(self, vector: Array) -> Array:
        """A vector that may be written to: this one where nothing is being sent from it, or else
        another [n] of its dtype, of any values."""
        self.move()
        if not any(vector is known for known in self._vectors):
            self._vectors.append(vector)
        read = {id(of) for _, of in self._sending}
        if id(vector) not in read:
            return vector
        free = next((known for known in self._vectors if id(known) not in read), None)
        if free is None:
            free = empty_like(vector, vector.size)
            self._vectors.append(free)
        return free

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for transfer, _ in self._sending:
            self._endpoint.finish([transfer], "answers to workers")
        self._sending.clear()
