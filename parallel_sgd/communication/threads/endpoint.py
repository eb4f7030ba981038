"""Messages between ranks that are threads of one process."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

from ...errors import RanksLost, UserError
from ..endpoint import Bytes, Endpoint, Header, OtherLength, Transfer, send_and_receive_tags
from ..liveness.failure import RankFailed
from ..liveness.finish import ON_ITS_WAY_S
from ..phrases import waiting_for_finished

Key = tuple[int, int, int]  #: sender, receiver, tag


class Mailbox:
    """What the ranks of one process have sent and not yet received, by sender, receiver and tag.

    Args:
        ranks: of the whole world, by rank here.
        left: those of them whose program has ended.
    """

    def __init__(self, ranks: Sequence[int], left: Set[int]) -> None:
        self.changed = threading.Condition()
        self.ranks, self._left = ranks, left
        self.aborted = self.revoked = False
        self._queues: defaultdict[Key, deque[Any]] = defaultdict(deque)

    def put(self, key: Key, array: Bytes | Header) -> None:
        with self.changed:
            self._queues[key].append(array.copy())
            self.changed.notify_all()

    def take(self, key: Key) -> Any:
        """The oldest of them, if there is any."""
        with self.changed:
            if self.aborted:
                raise RankFailed(f"rank {key[1]} waited for a message of a rank that failed")
            if self.revoked:
                raise RanksLost(f"a rank has died: rank {key[1]} waited for a message")
            queue = self._queues[key]
            return queue.popleft() if queue else None

    def length_of_next(self, key: Key) -> int:
        """Of the oldest of them; 0 where there is none."""
        with self.changed:
            queue = self._queues[key]
            return len(queue[0]) if queue else 0

    def finished_peers(self, peers: Iterable[int]) -> list[int]:
        """Those of these ranks whose program has ended: of them comes only what is here already."""
        return [peer for peer in peers if self.ranks[peer] in self._left]

    def wake(self) -> None:
        """Whoever waits is to look again."""
        with self.changed:
            self.changed.notify_all()

    def abort(self) -> None:
        with self.changed:
            self.aborted = True
            self.changed.notify_all()

    def revoke(self) -> None:
        with self.changed:
            self.revoked = True
            self.changed.notify_all()


class MailboxWaits:
    """How one thread waits for messages, at most `timeout_s` at a time."""

    def __init__(self, mailbox: Mailbox, rank: int, timeout_s: float) -> None:
        self._mailbox, self.rank, self.timeout_s = mailbox, rank, timeout_s
        self._waits_since: tuple[str, float] | None = None
        self._gone_since: float | None = None

    def idle(self, seconds: float) -> None:
        with self._mailbox.changed:
            if not (self._mailbox.aborted or self._mailbox.revoked):
                self._mailbox.changed.wait(seconds)

    @contextmanager
    def _waiting(self, name: str) -> Iterator[None]:
        """Within this `with` block `_check_patience` looks at the clock."""
        self._waits_since, self._gone_since = (name, time.monotonic()), None
        try:
            yield
        finally:
            self._waits_since = None

    def _check_patience(self, peers: Iterable[int]) -> None:
        """Raise a UserError where these ranks let this one wait too long, or one of them has left;
        asked where nothing of them is here."""
        if self._waits_since is None:
            return
        name, since = self._waits_since
        now = time.monotonic()
        waits = f"rank {self._mailbox.ranks[self.rank]} waits in {name}"
        gone = self._mailbox.finished_peers(peers)
        if now - since > self.timeout_s:
            raise UserError(f"{waits} for more than timeout_s={self.timeout_s:g} s")
        if gone and self._gone_since is None:
            self._gone_since = now
        if gone and now - cast(float, self._gone_since) > ON_ITS_WAY_S:
            raise UserError(
                waiting_for_finished([self._mailbox.ranks[peer] for peer in gone], waits)
            )


class ThreadEndpoint(MailboxWaits, Endpoint):
    """One thread's side; what it sends is copied, so that a transfer has ended as it begins."""

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
            self._check_patience(self._awaited)
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
