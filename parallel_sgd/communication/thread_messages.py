"""Messages between ranks that are threads of one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from .messages import Array, Messages, Then
from .thread_endpoint import Key, Mail, RankFailed

FIRST_TAG = 100  #: those of endpoints are smaller


class ThreadMessages(Messages):
    """One thread's messages; what it sends is copied, so that it has been sent at once."""

    def __init__(self, mail: Mail, rank: int, timeout_s: float) -> None:
        self._mail, self._rank, self._timeout_s = mail, rank, timeout_s
        self._sent: list[Then] = []
        self._receives: list[tuple[Key, Array, Then]] = []
        self._waits_since: tuple[str, float] | None = None

    def send(self, array: Array, peer: int, tag: int, then: Then) -> None:
        self._mail.put((self._rank, peer, FIRST_TAG + tag), array)
        self._sent.append(then)

    def receive(self, array: Array, peer: int, tag: int, then: Then) -> None:
        self._receives.append(((peer, self._rank, FIRST_TAG + tag), array, then))

    def progress(self) -> bool:
        ended, self._sent = self._sent, []
        waiting = []
        for key, array, then in self._receives:
            sent = self._mail.take(key)
            if sent is None:
                waiting.append((key, array, then))
                continue
            assert sent.nbytes == array.nbytes, "a message of another length than was expected"
            array[...] = sent
            ended.append(then)
        self._receives = waiting
        for call in ended:
            call()
        if not ended:
            self._check_patience()
        return bool(ended)

    @property
    def under_way(self) -> int:
        return len(self._sent) + len(self._receives)

    def idle(self, seconds: float) -> None:
        with self._mail.changed:
            if not self._mail.aborted:
                self._mail.changed.wait(seconds)

    @contextmanager
    def watched(self, name: str) -> Iterator[None]:
        self._waits_since = name, time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None

    def _check_patience(self) -> None:
        if self._waits_since:
            name, since = self._waits_since
            if time.monotonic() - since > self._timeout_s:
                raise RankFailed(f"rank {self._rank} waited in {name} longer than timeout_s")
