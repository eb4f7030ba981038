"""Array messages between ranks over a `Mesh`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

import numpy as np

from ..backoff import Backoff
from ..cuda.staged_messages import StagedMessages
from ..liveness.watchdog import Watchdog
from ..messages import Array, Then
from .mesh import Mesh
from .peer import MESSAGES

#: Few checks before a sleep: a message ends the sleep, and other ranks may need the core.
AT_ONCE, IDLE_S = 2, 1e-3


class MeshMessages(StagedMessages):
    """Messages of NumPy arrays, or of the arrays of a GPU through memory of the host.

    Args:
        mesh: connections of the ranks.
        watched: bounds every wait.
    """

    def __init__(self, mesh: Mesh, watched: Watchdog) -> None:
        super().__init__()
        self._mesh, self._watched = mesh, watched
        self._done: list[Then] = []
        self._begun, self._name = 0, "messages"

    def _send(self, array: Array, peer: int, tag: int, then: Then) -> None:
        self._begun += 1
        sent = partial(self._done.append, then)
        self._mesh.send(bytes_of(array), peer, (MESSAGES, tag), sent)

    def _receive(self, array: Array, peer: int, tag: int, then: Then) -> None:
        self._begun += 1
        done = self._done
        self._mesh.receive(bytes_of(array), peer, (MESSAGES, tag), lambda data: done.append(then))

    def _progress(self) -> bool:
        self._mesh.drive()
        if not self._done:
            self._mesh.require_connected(MESSAGES, self._name)
            return False
        done = self._done[:]
        del self._done[: len(done)]
        self._begun -= len(done)
        for then in done:
            then()
        return True

    @property
    def _pending(self) -> int:
        return self._begun

    def watched(self, name: str) -> AbstractContextManager[object]:
        self._name = name
        return self._watched(name, awaited=self._awaited)

    def idle(self, seconds: float) -> None:
        self._mesh.idle(seconds)

    def backoff(self, *, computing: bool = False) -> Backoff:
        if computing:
            return super().backoff(computing=True)
        return Backoff(self.idle, at_once=AT_ONCE, first_s=IDLE_S)

    def _awaited(self) -> list[int]:
        return [self._mesh.world_ranks[peer] for peer in self._mesh.awaited(MESSAGES)]


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of a contiguous NumPy array, without a copy. Local."""
    return memoryview(array.reshape(-1).view(np.uint8))
