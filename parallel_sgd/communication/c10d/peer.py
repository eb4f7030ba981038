"""The connection to a rank: its bytes are cut into messages, each of which meets its receive.

A message is a header (channel, tag, bytes) and its bytes. A message without a receive is kept.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable

from ...errors import UserError
from ...validation import line_of

COLLECTIVES, MESSAGES, ENDPOINT, END = range(4)
"""Channels of independent messages; by a message of END a rank says it needs no more messages."""

_HEADER = struct.Struct("=qqq")  #: channel; tag; bytes of the message
_READS = 8  #: most messages read from a rank before the next rank has its turn

Key = tuple[int, int]  #: channel and tag
Received = Callable[[memoryview], object]  #: called with the bytes of a message
Sent = Callable[[], object]


class Receive:
    """A posted receive.

    Attributes:
        into: room for the bytes of the message; None: as much as the message has.
        then: called with the received bytes.
    """

    __slots__ = ("into", "then")

    def __init__(self, into: memoryview | None, then: Received) -> None:
        self.into, self.then = into, then


class Peer:
    """The state of the connection to a rank. All methods are local, and none of them waits.

    Args:
        rank: the remote rank.
        name: its number in error texts.
        connection: non-blocking; None for this rank itself.
        most_kept: bytes kept without a receive, above which nothing more is read.

    Attributes:
        sending: unsent parts of messages, in order; after the last part of a message its `then`.
        kept: messages without a receive, in order.
        kept_bytes: their size.
        finished: the rank needs no more messages.
        lost: the reason, once the connection has ended.
        events: epoll's events for this connection, for the `Mesh`.
        on_early: called with the rank and key of a message without a receive.
    """

    __slots__ = (
        "_got", "_header", "_into", "_key", "_most_kept", "_posted", "_receive", "connection",
        "events", "finished", "kept", "kept_bytes", "lost", "name", "on_early", "rank", "sending",
    )  # fmt: skip

    def __init__(
        self, rank: int, name: int, connection: socket.socket | None, most_kept: int
    ) -> None:
        self.rank, self.name, self.connection = rank, name, connection
        self.sending: deque[memoryview | Sent] = deque()
        self.kept: dict[Key, deque[memoryview]] = {}
        self.kept_bytes = 0
        self.events, self.finished, self.lost = 0, False, ""
        self.on_early: Callable[[int, Key], object] = lambda peer, key: None
        self._most_kept = most_kept
        self._posted: dict[Key, deque[Receive]] = {}  # in order
        # Of the message being received: its key, its receive (None if not posted yet), the place of
        # its bytes (None until its header has come), and the bytes of the header, then of itself.
        self._key: Key = (END, 0)
        self._receive: Receive | None = None
        self._into: memoryview | None = None
        self._header, self._got = bytearray(_HEADER.size), 0

    def awaits(self, channel: int) -> bool:
        """Return True if messages of a channel are pending from this rank, or any to this rank."""
        receiving = self._receive is not None and self._key[0] == channel
        return bool(self.sending) or receiving or any(key[0] == channel for key in self._posted)

    @property
    def full(self) -> bool:
        """True if nothing more may be kept, and no receive is pending."""
        full = self.kept_bytes > self._most_kept
        return full and not self._posted and self._receive is None

    def post(self, key: Key, receive: Receive) -> None:
        """Begin to receive a message: one that is kept, that is arriving, or that is to come."""
        if key in self.kept:
            data = self.take(key)
            part = self._room(receive, data.nbytes)
            part[:] = data
            receive.then(part)
        elif self._into is not None and self._receive is None and self._key == key:
            before, self._receive = self._into, receive  # its header has come
            self._into = self._room(receive, before.nbytes)
            self._into[: self._got] = before[: self._got]
        else:
            self._posted.setdefault(key, deque()).append(receive)

    def cancel(self, key: Key) -> None:
        """Withdraw all receives of a key without a message."""
        self._posted.pop(key, None)

    def take(self, key: Key) -> memoryview:
        """Remove and return the next kept message."""
        data = self.kept[key].popleft()
        if not self.kept[key]:
            del self.kept[key]
        self.kept_bytes -= data.nbytes
        return data

    def deliver(self, key: Key, data: memoryview) -> None:
        """Receive a message of this rank to itself."""
        self._begin_message(key, data.nbytes)
        assert self._into is not None
        self._into[:] = data
        self._end_message(self._into)

    def send(self, key: Key, data: memoryview, then: Sent) -> None:
        """Append a message, and send as much as the connection takes."""
        idle = not self.sending
        self.sending += (memoryview(_HEADER.pack(*key, data.nbytes)), data, then)
        if idle:
            self.flush()

    def say_end(self) -> None:
        """Tell the rank that this rank needs no more messages, if the connection takes it.

        Raises:
            OSError: the rank has ended, or has left all unread.
        """
        if self.connection is not None and not self.lost and not self.sending:
            self.connection.send(_HEADER.pack(END, 0, 0))

    def read(self) -> None:
        """Receive what has come."""
        for _ in range(_READS):
            if not self._read_message() or self.full:
                return

    def flush(self) -> None:
        """Send as much as the connection takes."""
        assert self.connection is not None
        sending = self.sending
        while sending:
            parts = [part for part in (sending[0], sending[1]) if isinstance(part, memoryview)]
            try:
                count = self.connection.sendmsg(parts)
            except BlockingIOError:
                return
            except OSError as error:
                # What came before the end, perhaps END, is still there.
                while self._read_message():
                    pass
                self.lost = self.lost or line_of(error)
                return
            for part in parts:
                if count < part.nbytes:
                    sending[0] = part[count:]
                    break
                count -= part.nbytes
                sending.popleft()
            if not isinstance(then := sending[0], memoryview):
                sending.popleft()
                then()

    def _room(self, receive: Receive, nbytes: int) -> memoryview:
        """Return memory for a message of its receive."""
        if receive.into is None:
            return memoryview(bytearray(nbytes))
        if nbytes > receive.into.nbytes:
            raise mismatch(self.name, nbytes, receive.into.nbytes)
        return receive.into[:nbytes]

    def _begin_message(self, key: Key, nbytes: int) -> None:
        """Find the receive of an arriving message, or memory to keep the message.

        Raises:
            UserError: the message is an error, and will be dropped.
        """
        self._key, self._got, posted = key, 0, self._posted.get(key)
        try:
            if posted is not None:
                receive = posted.popleft()
                if not posted:
                    del self._posted[key]
                self._into = self._room(receive, nbytes)
                self._receive = receive
                return
            if key[0] == END:
                self.finished = True
            else:
                self.on_early(self.rank, key)
        except UserError:
            self._key = (END, 0)
            raise
        finally:
            if self._receive is None:
                self._into = memoryview(bytearray(nbytes))

    def _end_message(self, received: memoryview) -> None:
        receive, self._receive, self._into, self._got = self._receive, None, None, 0
        if receive is not None:
            receive.then(received)
        elif self._key[0] != END:
            self.kept.setdefault(self._key, deque()).append(received)
            self.kept_bytes += received.nbytes

    def _read_message(self) -> bool:
        """Receive a message. Return False if bytes of the message are missing."""
        if self.lost:
            return False
        if self._into is None:
            if not self._fill(memoryview(self._header)):
                return False
            channel, tag, nbytes = _HEADER.unpack(self._header)
            self._begin_message((channel, tag), nbytes)
        assert self._into is not None
        if not self._fill(self._into):
            return False
        self._end_message(self._into)
        return True

    def _fill(self, into: memoryview) -> bool:
        """Receive bytes up to the end of a header or message. Return False if some are missing."""
        assert self.connection is not None
        while self._got < into.nbytes:
            try:
                count = self.connection.recv_into(into[self._got :])
            except BlockingIOError:
                return False
            except OSError as error:
                self.lost = line_of(error)
                return False
            if count == 0:
                self.lost = "its connection has ended"
                return False
            self._got += count
        return True


def mismatch(rank: int, sent: int, expected: int) -> UserError:
    """Return the error of a message of a wrong size from a rank."""
    return UserError(
        f"rank {rank} has sent {sent} bytes, but this rank expects {expected}: arrays must have "
        "the same size on all ranks"
    )
