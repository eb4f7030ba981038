"""Array messages of NumPy arrays, and of a GPU's arrays through memory of the host."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from ...kernels import array_module
from ..messages import Array, Messages, Then
from .staging import Direct, Event, Staged, Staging, is_done


class StagedMessages(Messages):
    """Messages of NumPy arrays, or of the arrays of a GPU.

    Args:
        cuda_aware: the library for messages takes CuPy arrays directly; otherwise stage arrays
            through pinned host memory, while the GPU computes and messages travel.

    A subclass sends and receives by a library for messages.
    """

    def __init__(self, *, cuda_aware: bool = False) -> None:
        self._cuda_aware = cuda_aware
        self._staging: Staging | None = None  # set by the first CuPy array
        #: Calls to make once their GPU events are done, in the order of the events.
        self._waiting: deque[tuple[Event, Callable[[], None]]] = deque()

    @abstractmethod
    def _send(self, array: Array, peer: int, tag: int, then: Then) -> None:
        """Begin to send an array of the host, or of a GPU if `cuda_aware`."""

    @abstractmethod
    def _receive(self, array: Array, peer: int, tag: int, then: Then) -> None:
        """Begin to receive into an array of the host, or of a GPU if `cuda_aware`."""

    @abstractmethod
    def _progress(self) -> bool:
        """Drive all begun messages: see `progress`."""

    @property
    @abstractmethod
    def _pending(self) -> int:
        """Number of begun and pending messages."""

    def send(self, array: Array, peer: int, tag: int, then: Then) -> None:
        if array_module(array) is np:
            self._send(array, peer, tag, then)
            return
        staging = self._staging_of(array)
        buffer, event = staging.begin_send(array)

        def sent() -> None:
            staging.end_send(array)
            then()

        self._waiting.append((event, partial(self._send, buffer, peer, tag, sent)))

    def receive(self, array: Array, peer: int, tag: int, then: Then) -> None:
        if array_module(array) is np:
            self._receive(array, peer, tag, then)
            return
        buffer, event, copy_in = self._staging_of(array).begin_receive(array)

        def received() -> None:
            copy_in()
            then()

        begin = partial(self._receive, buffer, peer, tag, received)
        if event is None:
            begin()
        else:
            self._waiting.append((event, begin))

    def progress(self) -> bool:
        # bounded: as long as the GPU is ready
        while self._waiting and is_done(self._xp, self._waiting[0][0]):
            self._waiting.popleft()[1]()
        return self._progress()

    @property
    def under_way(self) -> int:
        return self._pending + len(self._waiting)

    def _staging_of(self, array: Array) -> Staging:
        if self._staging is None:
            self._xp = array_module(array)
            self._staging = (Direct if self._cuda_aware else Staged)(array)
        return self._staging
