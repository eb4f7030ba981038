"""Array messages between MPI ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar

from mpi4py import MPI

from ..cuda.staged_messages import StagedMessages
from ..liveness.finish import CollectiveCounter
from ..liveness.watchdog import Watchdog
from ..messages import MOST_VALUES, Array, Then, pieces_of


class MpiMessages(StagedMessages):
    """Messages of NumPy arrays, or of the arrays of a GPU.

    Args:
        comm: communicator; its remaining messages must have different tags.
        watched: bounds every wait.
        counter: counts collective operations made of messages, together with the collectives of
            `comm`.
        cuda_aware: pass CuPy arrays to MPI directly: see `StagedMessages`.

    Attributes:
        most_values: most values in a message.
    """

    most_values: ClassVar[int] = MOST_VALUES

    def __init__(
        self,
        comm: MPI.Intracomm,
        watched: Watchdog,
        counter: CollectiveCounter,
        *,
        cuda_aware: bool = False,
    ) -> None:
        super().__init__(cuda_aware=cuda_aware)
        self._comm, self._watched, self._counter = comm, watched, counter
        self._requests: list[MPI.Request] = []
        self._then: list[Then] = []

    def _send(self, array: Array, peer: int, tag: int, then: Then) -> None:
        self._begin(self._comm.Isend, array, peer, tag, then)

    def _receive(self, array: Array, peer: int, tag: int, then: Then) -> None:
        self._begin(self._comm.Irecv, array, peer, tag, then)

    def _progress(self) -> bool:
        try:
            ended = MPI.Request.Testsome(self._requests) if self._requests else None
        except MPI.Exception as error:
            self._watched.raise_rank_failure(error, "messages")
            raise
        if not ended:
            return False
        then = [self._then[i] for i in ended]
        for i in sorted(ended, reverse=True):
            del self._requests[i], self._then[i]
        for call in then:
            call()
        return True

    @property
    def _pending(self) -> int:
        return len(self._requests)

    def enter(self) -> None:
        self._counter.enter()

    def watched(self, name: str) -> AbstractContextManager[object]:
        return self._watched(name, self._counter)

    def _begin(
        self, begin: Callable[..., MPI.Request], array: Array, peer: int, tag: int, then: Then
    ) -> None:
        """Begin to send or receive. Long arrays travel as several messages, in order."""
        try:
            if array.size <= self.most_values:
                self._requests.append(begin(array, peer, tag))
                self._then.append(then)
                return
            pieces = pieces_of(array, self.most_values)
            left = len(pieces)

            def ended() -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    then()

            for piece in pieces:
                self._requests.append(begin(piece, peer, tag))
                self._then.append(ended)
        except MPI.Exception as error:
            self._watched.raise_rank_failure(error, "messages")
            raise
