"""Array messages between ranks as threads of a process."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ..messages import Array, Messages, Then
from .endpoint import Key, Mailbox, MailboxWaits

FIRST_TAG = 100  #: above the tags of endpoints


class ThreadMessages(MailboxWaits, Messages):
    """Messages of a thread. Sent arrays are copied, so a send completes at once."""

    def __init__(self, mailbox: Mailbox, rank: int, timeout_s: float) -> None:
        super().__init__(mailbox, rank, timeout_s)
        self._sent: list[Then] = []
        self._receives: list[tuple[Key, Array, Then]] = []

    def watched(self, name: str) -> AbstractContextManager[None]:
        return self._waiting(name)

    def send(self, array: Array, peer: int, tag: int, then: Then) -> None:
        self._mailbox.put((self.rank, peer, FIRST_TAG + tag), array)
        self._sent.append(then)

    def receive(self, array: Array, peer: int, tag: int, then: Then) -> None:
        self._receives.append(((peer, self.rank, FIRST_TAG + tag), array, then))

    def progress(self) -> bool:
        ended, self._sent = self._sent, []
        waiting = []
        for key, array, then in self._receives:
            sent = self._mailbox.take(key)
            if sent is None:
                waiting.append((key, array, then))
                continue
            assert sent.nbytes <= array.nbytes, "a message is longer than expected"
            array[: sent.size] = sent
            ended.append(then)
        self._receives = waiting
        for call in ended:
            call()
        if not ended:
            self._check_timeout(peer for (peer, _, _), _, _ in self._receives)
        return bool(ended)

    @property
    def under_way(self) -> int:
        return len(self._sent) + len(self._receives)
