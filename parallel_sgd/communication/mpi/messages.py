"""Array messages between MPI ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import ClassVar

import numpy as np
from mpi4py import MPI

from ...kernels import array_module
from ..cuda.staging import Direct, Event, Staged, Staging, is_done
from ..liveness.finish import CollectiveCounter
from ..liveness.watchdog import Watchdog
from ..messages import MOST_VALUES, Array, Messages, Then, pieces_of


class MpiMessages(Messages):
    """Messages of NumPy arrays, or of the arrays of a GPU.

    Args:
        comm: communicator; its remaining messages must have different tags.
        watched: bounds every wait.
        counter: counts collective operations made of messages, together with the collectives of
            `comm`.
        cuda_aware: pass CuPy arrays to MPI directly; otherwise stage arrays through pinned host
            memory, while the GPU computes and messages travel.

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
        self._comm, self._watched, self._cuda_aware = comm, watched, cuda_aware
        self._counter = counter
        self._requests: list[MPI.Request] = []
        self._then: list[Then] = []
        self._staging: Staging | None = None  # set by the first CuPy array
        #: MPI calls to make once their GPU events are done, in the order of the events.
        self._waiting: deque[tuple[Event, Callable[[], None]]] = deque()

    def send(self, array: Array, peer: int, tag: int, then: Then) -> None:
        if array_module(array) is np:
            self._begin(self._comm.Isend, array, peer, tag, then)
            return
        staging = self._staging_of(array)
        buffer, event = staging.begin_send(array)

        def sent() -> None:
            staging.end_send(array)
            then()

        begin = partial(self._begin, self._comm.Isend, buffer, peer, tag, sent)
        self._waiting.append((event, begin))

    def receive(self, array: Array, peer: int, tag: int, then: Then) -> None:
        if array_module(array) is np:
            self._begin(self._comm.Irecv, array, peer, tag, then)
            return
        buffer, event, copy_in = self._staging_of(array).begin_receive(array)

        def received() -> None:
            copy_in()
            then()

        if event is None:
            self._begin(self._comm.Irecv, buffer, peer, tag, received)
        else:
            begin = partial(self._begin, self._comm.Irecv, buffer, peer, tag, received)
            self._waiting.append((event, begin))

    def progress(self) -> bool:
        # bounded: as long as the GPU is ready
        while self._waiting and is_done(self._xp, self._waiting[0][0]):
            self._waiting.popleft()[1]()
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
    def under_way(self) -> int:
        return len(self._requests) + len(self._waiting)

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

    def _staging_of(self, array: Array) -> Staging:
        if self._staging is None:
            self._xp = array_module(array)
            self._staging = (Direct if self._cuda_aware else Staged)(array)
        return self._staging
