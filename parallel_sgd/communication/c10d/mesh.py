"""Messages over TCP between every two ranks of a communicator, without a thread.

PyTorch's own messages (`isend`, `irecv`) cannot be polled, and need to know the exact length before
they are received. So ranks have connections of their own: see `connections`. Each message is a
header (channel, tag, bytes) and its bytes.

A message without a receive is kept, up to `MOST_KEPT` bytes from a rank. Beyond this limit nothing
more is read from the rank before the next receive: the sender waits. A receive of a later message
reads, and keeps, all messages before that message.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ...errors import PeerFailure, UserError
from ...validation import line_of
from ..liveness.diagnosis import rank_in_words
from ..phrases import waiting_for_finished

COLLECTIVES, MESSAGES, ENDPOINT, END = range(4)
"""Channels of independent messages; by a message of END a rank says it needs no more messages."""

MOST_KEPT = 64 << 20  #: default of the most bytes from a rank kept without a receive

_HEADER = struct.Struct("=qqq")  #: channel; tag; bytes of the message

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_READS = 8  #: most messages read from a rank before the next rank has its turn

Key = tuple[int, int]  #: channel and tag
Received = Callable[[memoryview], object]  #: called with the bytes of a message
Sent = Callable[[], object]


class _Receive:
    """A posted receive.

    Attributes:
        into: room for the bytes of the message; None: as much as the message has.
        then: called with the received bytes.
    """

    __slots__ = ("into", "then")

    def __init__(self, into: memoryview | None, then: Received) -> None:
        self.into, self.then = into, then


class _Peer:
    """The state of the connection to a rank.

    Attributes:
        rank: the remote rank.
        connection: None for this rank itself.
        sending: unsent parts of messages, in order; after the last part of a message its `then`.
        posted: receives, in order.
        kept: messages without a receive, in order.
        kept_bytes: their size.
        header: of the message being received.
        key, into: its key, and the place of its bytes; None until its header has come.
        receive: its receive; None if not posted yet.
        got: bytes of the header, then of the message, received so far.
        finished: the rank needs no more messages.
        lost: the reason, once the connection has ended.
        events: epoll's events for this connection.
    """

    __slots__ = (
        "connection", "events", "finished", "got", "header", "into", "kept", "kept_bytes", "key",
        "lost", "posted", "rank", "receive", "sending",
    )  # fmt: skip

    def __init__(self, rank: int, connection: socket.socket | None) -> None:
        self.rank, self.connection = rank, connection
        self.sending: deque[memoryview | Sent] = deque()
        self.posted: dict[Key, deque[_Receive]] = {}
        self.kept: dict[Key, deque[memoryview]] = {}
        self.kept_bytes = self.got = self.events = 0
        self.header = bytearray(_HEADER.size)
        self.key: Key = (END, 0)
        self.receive: _Receive | None = None
        self.into: memoryview | None = None
        self.finished, self.lost = False, ""

    def awaits(self, channel: int) -> bool:
        """Return True if messages of a channel are pending from this rank, or any to this rank."""
        receiving = self.receive is not None and self.key[0] == channel
        return bool(self.sending) or receiving or any(key[0] == channel for key in self.posted)


class Mesh:
    """Messages between every two ranks, matched by sender, channel and tag, in order.

    Args:
        rank: this rank.
        connections: a connected, non-blocking socket for each other rank.
        world_ranks: numbers of the ranks in error texts.
        most_kept: bytes from a rank kept without a receive, above which nothing more is read.

    Attributes:
        on_early: called with the rank and key of a message without a receive.

    All methods are local. Any thread may use the mesh. A function given as `then` is called by any
    thread, in any method, so it should only note the event. A forked process has no connection.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        world_ranks: Sequence[int],
        *,
        most_kept: int = MOST_KEPT,
    ) -> None:
        self.rank, self.world_ranks, self._most_kept = rank, world_ranks, most_kept
        self.on_early: Callable[[int, Key], object] = lambda peer, key: None
        self._peers = {peer: _Peer(peer, connection) for peer, connection in connections.items()}
        self._by_descriptor = {
            connection.fileno(): self._peers[peer] for peer, connection in connections.items()
        }
        self._peers[rank] = _Peer(rank, None)
        self._lock, self._epoll = threading.RLock(), select.epoll()
        self._lost: list[_Peer] = []
        for other in self._by_descriptor.values():
            self._register(other)
        # The sockets must not be collected before this object.
        self._closed = weakref.finalize(self, _close, self._epoll, [*connections.values()])
        self._closed.atexit = False
        _open.add(self)

    def send(self, data: memoryview, peer: int, key: Key, then: Sent) -> None:
        """Begin to send bytes, which may not change before `then` is called.

        Raises:
            UserError: the connection has ended.
        """
        with self._lock:
            self._require_open()
            to = self._peers[peer]
            if to.connection is None:
                self._begin_message(to, key, data.nbytes)
                assert to.into is not None
                to.into[:] = data
                self._end_message(to, to.into)
                then()
                return
            if to.lost:
                raise self._ended(to, "a message to that rank")
            idle = not to.sending
            to.sending += (memoryview(_HEADER.pack(*key, data.nbytes)), data, then)
            if idle:
                self._flush(to)

    def receive(self, into: memoryview | None, peer: int, key: Key, then: Received) -> None:
        """Begin to receive a message.

        Args:
            into: room for the message, of any larger size; None: memory of its size.
            then: called with the received bytes.
        """
        with self._lock:
            self._require_open()
            sender, receive = self._peers[peer], _Receive(into, then)
            if key in sender.kept:
                data = self._take(sender, key)
                part = self._room(sender, receive, data.nbytes)
                part[:] = data
                then(part)
            elif sender.into is not None and sender.receive is None and sender.key == key:
                before, sender.receive = sender.into, receive  # its header has come
                sender.into = self._room(sender, receive, before.nbytes)
                sender.into[: sender.got] = before[: sender.got]
            else:
                sender.posted.setdefault(key, deque()).append(receive)
            self._register(sender)

    def cancel(self, peer: int, key: Key) -> None:
        """Withdraw all receives of a key without a message."""
        with self._lock:
            self._peers[peer].posted.pop(key, None)
            self._register(self._peers[peer])

    def unreceived(self, channel: int) -> list[tuple[int, Key]]:
        """Return the rank and the key of every message without a receive."""
        with self._lock:
            return [
                (peer.rank, key)
                for peer in self._peers.values()
                for key in peer.kept
                if key[0] == channel
            ]

    def kept(self, peer: int, key: Key) -> memoryview | None:
        """Return the bytes of the next message without a receive, or None. The message stays."""
        with self._lock:
            messages = self._peers[peer].kept.get(key)
            return messages[0] if messages else None

    def discard(self, peer: int, key: Key) -> None:
        """Remove the next message without a receive."""
        with self._lock:
            self._take(self._peers[peer], key)
            self._register(self._peers[peer])

    def drive(self) -> None:
        """Send and receive what is possible now."""
        with self._lock:
            self._require_open()
            for descriptor, event in self._epoll.poll(0):
                peer = self._by_descriptor[descriptor]
                if event & ~_OUT:
                    self._read(peer)
                if event & _OUT and not peer.lost:
                    self._flush(peer)

    def idle(self, seconds: float) -> None:
        """Yield the core for `seconds`, or until a message arrives or can be sent."""
        self._epoll.poll(seconds)

    def awaited(self, channel: int) -> list[int]:
        """Return the ranks of pending messages: senders and receivers."""
        with self._lock:
            return [peer.rank for peer in self._peers.values() if peer.awaits(channel)]

    def require_connected(self, channel: int, name: str) -> None:
        """Check that no rank of a pending message has ended.

        Args:
            name: of the wait, for the error text.
        Raises:
            PeerFailure: an awaited rank has failed, or a receiver of a pending message.
            UserError: such a rank has finished.
        """
        if not self._lost:
            return
        with self._lock:
            for peer in self._lost:
                if peer.awaits(channel):
                    raise self._ended(peer, name)

    def failure(self, name: str) -> UserError | None:
        """Return the error of a failed rank, or None if no rank has failed.

        Args:
            name: of the wait, for the error text.
        """
        failed = [peer for peer in self._lost if not peer.finished]
        return self._ended(failed[0], name) if failed else None

    def require_unfinished(self, peer: int, name: str) -> None:
        """Raise a UserError if a rank has finished."""
        if self._peers[peer].finished:
            raise self._ended(self._peers[peer], name)

    @property
    def finished(self) -> list[int]:
        """The ranks that need no more messages."""
        return [peer.rank for peer in self._peers.values() if peer.finished]

    def close(self) -> None:
        """Call `say_end`, and close the connections.

        No message may be pending.
        """
        with self._lock:
            if self._closed.alive:
                self.say_end()
            self._closed()

    def say_end(self) -> None:
        """Tell all ranks that this rank needs no more messages."""
        message = _HEADER.pack(END, 0, 0)
        for peer in self._peers.values():
            if peer.connection is not None and not peer.lost and not peer.sending:
                with contextlib.suppress(OSError):  # that rank has ended, or has left all unread
                    peer.connection.send(message)

    def close_in_child(self) -> None:
        """Close the connections of a forked process: they would outlive this rank."""
        self._lock = threading.RLock()  # a thread of the parent may hold the old lock
        self._closed()

    def _require_open(self) -> None:
        if not self._closed.alive:
            raise UserError(
                "the connections of this communicator are closed: after close(), or in a process "
                "that a rank has forked"
            )

    def _take(self, peer: _Peer, key: Key) -> memoryview:
        """Remove and return the next kept message."""
        data = peer.kept[key].popleft()
        if not peer.kept[key]:
            del peer.kept[key]
        peer.kept_bytes -= data.nbytes
        return data

    def _room(self, peer: _Peer, receive: _Receive, nbytes: int) -> memoryview:
        """Return memory for a message of its receive."""
        if receive.into is None:
            return memoryview(bytearray(nbytes))
        if nbytes > receive.into.nbytes:
            raise self.mismatch(peer.rank, nbytes, receive.into.nbytes)
        return receive.into[:nbytes]

    def mismatch(self, peer: int, sent: int, expected: int) -> UserError:
        return UserError(
            f"rank {self.world_ranks[peer]} has sent {sent} bytes, but this rank expects "
            f"{expected}: arrays must have the same size on all ranks"
        )

    def _begin_message(self, peer: _Peer, key: Key, nbytes: int) -> None:
        """Find the receive of an arriving message, or memory to keep the message.

        Raises:
            UserError: the message is an error, and will be dropped.
        """
        peer.key, peer.got, posted = key, 0, peer.posted.get(key)
        try:
            if posted is not None:
                receive = posted.popleft()
                if not posted:
                    del peer.posted[key]
                peer.into = self._room(peer, receive, nbytes)
                peer.receive = receive
                return
            if key[0] == END:
                peer.finished = True
            else:
                self.on_early(peer.rank, key)
        except UserError:
            peer.key = (END, 0)
            raise
        finally:
            if peer.receive is None:
                peer.into = memoryview(bytearray(nbytes))

    def _end_message(self, peer: _Peer, received: memoryview) -> None:
        receive, peer.receive, peer.into, peer.got = peer.receive, None, None, 0
        if receive is not None:
            receive.then(received)
        elif peer.key[0] != END:
            peer.kept.setdefault(peer.key, deque()).append(received)
            peer.kept_bytes += received.nbytes

    def _read(self, peer: _Peer) -> None:
        """Receive what has come from a rank."""
        for _ in range(_READS):
            if not self._read_message(peer):
                return
            if self._is_full(peer):
                self._register(peer)
                return

    def _read_message(self, peer: _Peer) -> bool:
        """Receive a message. Return False if bytes of the message are missing."""
        if peer.lost:
            return False
        if peer.into is None:
            if not self._fill(peer, memoryview(peer.header)):
                return False
            channel, tag, nbytes = _HEADER.unpack(peer.header)
            self._begin_message(peer, (channel, tag), nbytes)
        assert peer.into is not None
        if not self._fill(peer, peer.into):
            return False
        self._end_message(peer, peer.into)
        return True

    def _fill(self, peer: _Peer, into: memoryview) -> bool:
        """Receive bytes up to the end of a header or message. Return False if some are missing."""
        assert peer.connection is not None
        while peer.got < into.nbytes:
            try:
                count = peer.connection.recv_into(into[peer.got :])
            except BlockingIOError:
                return False
            except OSError as error:
                self._lose(peer, line_of(error))
                return False
            if count == 0:
                self._lose(peer, "its connection has ended")
                return False
            peer.got += count
        return True

    def _flush(self, peer: _Peer) -> None:
        """Send as much as the connection takes."""
        assert peer.connection is not None
        sending = peer.sending
        while sending:
            parts = [part for part in (sending[0], sending[1]) if isinstance(part, memoryview)]
            try:
                count = peer.connection.sendmsg(parts)
            except BlockingIOError:
                break
            except OSError as error:
                # What came before the end, perhaps END, is still there.
                while self._read_message(peer):
                    pass
                if not peer.lost:
                    self._lose(peer, line_of(error))
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
        self._register(peer)

    def _is_full(self, peer: _Peer) -> bool:
        """Return True if nothing more may be kept, and no receive is pending."""
        full = peer.kept_bytes > self._most_kept
        return full and not peer.posted and peer.receive is None

    def _register(self, peer: _Peer) -> None:
        """Watch a connection for bytes, unless too many are kept, and for room to send."""
        events = 0 if self._is_full(peer) else _IN
        if peer.sending:
            events |= _OUT
        if peer.connection is None or events == peer.events or peer.lost:
            return
        descriptor = peer.connection.fileno()
        if not peer.events:
            self._epoll.register(descriptor, events)
        elif not events:
            self._epoll.unregister(descriptor)
        else:
            self._epoll.modify(descriptor, events)
        peer.events = events

    def _lose(self, peer: _Peer, why: str) -> None:
        """Note the end of a connection: no error yet, as the rank may have no more messages."""
        assert peer.connection is not None
        if peer.events:
            self._epoll.unregister(peer.connection.fileno())
        peer.lost, peer.events = why, 0
        self._lost.append(peer)

    def _ended(self, peer: _Peer, name: str) -> UserError:
        rank, own = self.world_ranks[peer.rank], self.world_ranks[self.rank]
        if peer.finished:
            return UserError(waiting_for_finished([rank], f"rank {own} waits in {name}"))
        return PeerFailure(
            f"{rank_in_words(rank)} has failed or was killed: found in {name} ({peer.lost})"
        )


def _close(epoll: select.epoll, connections: Sequence[socket.socket]) -> None:
    epoll.close()
    for connection in connections:
        connection.close()


_open: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _for_all(method: Callable[[Mesh], None]) -> None:
    for mesh in list(_open):
        method(mesh)


os.register_at_fork(after_in_child=partial(_for_all, Mesh.close_in_child))
atexit.register(_for_all, Mesh.say_end)
