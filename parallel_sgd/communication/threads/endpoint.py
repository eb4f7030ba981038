"""Messages between ranks as threads of a process: requests and replies, and arrays."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

from ... import runtime
from ...errors import RankFailed, RanksLost, UserError
from ..endpoint import Bytes, Endpoint, Header, OtherLength, Transfer, send_and_receive_tags
from ..liveness.finish import ON_ITS_WAY_S
from ..messages import Array, Messages, Then
from ..phrases import waiting_for_finished

Key = tuple[int, int, int]  #: sender, receiver, tag

FIRST_TAG = 100  #: first tag of array messages, above the tags of endpoints


class Mailbox:
    """Messages sent but not yet received between the ranks of a process, by `Key`.

    A simulated message may be under way for a while. Messages of a key arrive in order.

    Args:
        ranks: world ranks, by rank.
        finished: world ranks of finished programs.
    """

    def __init__(self, ranks: Sequence[int], finished: Set[int]) -> None:
        self.changed = runtime.Condition()
        self.ranks, self._finished = ranks, finished
        self.aborted = self.revoked = False
        #: each message with the time of its arrival
        self._queues: defaultdict[Key, deque[tuple[float, Any]]] = defaultdict(deque)

    def put(self, key: Key, array: Bytes | Header) -> None:
        with self.changed:
            self._queues[key].append((runtime.delivery(), array.copy()))
            self.changed.notify_all()

    def take(self, key: Key) -> Any:
        """Remove and return the oldest message of a key, or None.

        Raises:
            RankFailed: a rank has ended with an error.
            RanksLost: a rank has failed.
        """
        with self.changed:
            if self.aborted:
                raise RankFailed(f"rank {key[1]} waited for a message of a rank that failed")
            if self.revoked:
                raise RanksLost(f"a rank has failed: rank {key[1]} waited for a message")
            return self._queues[key].popleft()[1] if self._has_arrived(key) else None

    def length_of_next(self, key: Key) -> int:
        """Return the length of the oldest message of a key, or 0 without a message."""
        with self.changed:
            return len(self._queues[key][0][1]) if self._has_arrived(key) else 0

    def _has_arrived(self, key: Key) -> bool:
        queue = self._queues[key]
        return bool(queue) and queue[0][0] <= runtime.monotonic()

    def finished_peers(self, peers: Iterable[int]) -> list[int]:
        """Return peers with finished programs: no new messages come from these."""
        return [peer for peer in peers if self.ranks[peer] in self._finished]


class MailboxWaits:
    """Bounded waits of a thread for messages, at most `timeout_s` each."""

    def __init__(self, mailbox: Mailbox, rank: int, timeout_s: float) -> None:
        self._mailbox, self.rank, self.timeout_s = mailbox, rank, timeout_s
        self._waits_since: tuple[str, float] | None = None
        self._finished_since: float | None = None

    def idle(self, seconds: float) -> None:
        with self._mailbox.changed:
            if not (self._mailbox.aborted or self._mailbox.revoked):
                self._mailbox.changed.wait(seconds)

    @contextmanager
    def _waiting(self, name: str) -> Iterator[None]:
        """Context manager: inside, `_check_timeout` checks the time."""
        self._waits_since, self._finished_since = (name, runtime.monotonic()), None
        try:
            yield
        finally:
            self._waits_since = None

    def _check_timeout(self, peers: Iterable[int]) -> None:
        """Raise a UserError after a timeout, or if an awaited peer has finished.

        Called only if no message of these peers has arrived.
        """
        if self._waits_since is None:
            return
        name, since = self._waits_since
        now = runtime.monotonic()
        waits = f"rank {self._mailbox.ranks[self.rank]} waits in {name}"
        finished = self._mailbox.finished_peers(peers)
        if now - since > self.timeout_s:
            raise UserError(f"{waits} for more than timeout_s={self.timeout_s:g} s")
        if finished and self._finished_since is None:
            self._finished_since = now
        if finished and now - cast(float, self._finished_since) > ON_ITS_WAY_S:
            raise UserError(
                waiting_for_finished([self._mailbox.ranks[peer] for peer in finished], waits)
            )


class ThreadEndpoint(MailboxWaits, Endpoint):
    """Endpoint between threads. Sent arrays are copied, so a send completes at once."""

    def __init__(
        self, mailbox: Mailbox, rank: int, peers: Sequence[int], serving: bool, timeout_s: float
    ) -> None:
        super().__init__(mailbox, rank, timeout_s)
        self.peers = tuple(peers)
        self._out, self._in = send_and_receive_tags(serving)
        self._listening = set(self.peers)
        self._awaited: tuple[int, ...] = ()

    def listen(self, peer: int) -> None:
        self._listening.add(peer)

    def arrivals(self) -> list[tuple[int, Header]]:
        arrived: list[tuple[int, Header]] = []
        for peer in sorted(self._listening):
            header = self._mailbox.take((peer, self.rank, self._in))
            if header is not None:
                self._listening.discard(peer)
                arrived.append((peer, header))
        if not arrived:
            self._check_timeout(self._awaited)
        return arrived

    def watched(self, name: str, peer: int) -> AbstractContextManager[None]:
        self._awaited = (peer,)
        return self._waiting(name)

    def receive(self, peer: int, body: Bytes) -> Transfer:
        return _Received(peer, self._mailbox, (peer, self.rank, self._in + 1), body)

    def next_body_length(self, peer: int) -> int:
        return self._mailbox.length_of_next((peer, self.rank, self._in + 1))

    def discard(self, peer: int) -> None:
        while self._mailbox.take((peer, self.rank, self._in + 1)) is not None:
            pass

    def send(self, peer: int, header: Header, body: Bytes | None = None) -> Transfer:
        if body is not None and len(body):
            self._mailbox.put((self.rank, peer, self._out + 1), body)
        self._mailbox.put((self.rank, peer, self._out), header)
        return _Sent(peer)

    def finished_peers(self) -> list[int]:
        return self._mailbox.finished_peers(self.peers)

    def close(self) -> None:
        self._listening.clear()


class _Sent:
    def __init__(self, peer: int) -> None:
        self.peer = peer

    def done(self) -> bool:
        return True


class _Received:
    def __init__(self, peer: int, mailbox: Mailbox, key: Key, body: Bytes) -> None:
        self.peer, self._mailbox, self._key, self._body = peer, mailbox, key, body
        self._ended = False

    def done(self) -> bool:
        if not self._ended:
            sent = self._mailbox.take(self._key)
            if sent is not None:
                self._ended = True
                if sent.size != self._body.size:
                    raise OtherLength
                self._body[...] = sent
        return self._ended


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
