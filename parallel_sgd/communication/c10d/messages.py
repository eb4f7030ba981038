"""Array messages between ranks over TCP, without a thread.

PyTorch's own messages (`isend`, `irecv`) cannot be polled, and need to know the exact length before
they are received. So messages have connections of their own here: see `connections`. Each message
is a header (tag, bytes) and its bytes.

A message without a receive is kept, up to `MOST_KEPT` bytes from a rank. Beyond that nothing more
is read from that rank until a receive takes what is kept: the sender then waits.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import cast

import numpy as np

from ...errors import PeerFailure, UserError
from ...validation import line_of
from ..liveness.diagnosis import rank_in_words
from ..liveness.watchdog import Watchdog
from ..messages import Array, Messages, Then

MOST_KEPT = 64 << 20
"""Bytes from a rank kept without a receive, above which nothing more is read from that rank."""

_HEADER = struct.Struct("=qq")  #: tag; bytes of the message

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_READS = 8  #: most messages read from a rank before the next rank has its turn


class _Receive:
    """A posted receive.

    Attributes:
        array: for the bytes of the message; None: a message of any length.
        then: called with the received bytes.
    """

    __slots__ = ("array", "then")

    def __init__(self, array: memoryview | None, then: Callable[[memoryview], object]) -> None:
        self.array, self.then = array, then


class _Peer:
    """The state of the connection to a rank.

    Attributes:
        sending: unsent parts of messages, in order; after the last part of a message its `then`.
        posted: receives by tag, in order.
        kept: messages without a receive, by tag.
        kept_bytes: their size.
        header: of the message being received.
        tag, into: its tag, and the place of its bytes; None until its header has come.
        receive: its receive; None if not posted yet.
        got: bytes of the header, then of the message, received so far.
        lost: the error, once the connection has ended.
        events: epoll's events, of which this connection is registered.
    """

    __slots__ = (
        "connection", "events", "got", "header", "into", "kept", "kept_bytes", "lost", "posted",
        "rank", "receive", "sending", "tag",
    )  # fmt: skip

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.sending: deque[memoryview | Then] = deque()
        self.posted: dict[int, deque[_Receive]] = {}
        self.kept: dict[int, deque[memoryview]] = {}
        self.kept_bytes = 0
        self.header = bytearray(_HEADER.size)
        self.got, self.tag = 0, 0
        self.receive: _Receive | None = None
        self.into: memoryview | None = None
        self.lost: str | None = None
        self.events = 0


class TcpMessages(Messages):
    """Messages of NumPy arrays over connections between ranks.

    Args:
        connections: a connected, non-blocking socket for each other rank.
        watched: bounds every wait.
        world_ranks: numbers of the ranks in error texts.

    Attributes:
        name: of the present wait, for error texts.

    For one thread at a time. A forked process has none of the connections.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        watched: Watchdog,
        world_ranks: Sequence[int],
    ) -> None:
        self._watched, self._world_ranks = watched, world_ranks
        self._peers = {rank: _Peer(rank, socket_) for rank, socket_ in connections.items()}
        self._by_descriptor = {peer.connection.fileno(): peer for peer in self._peers.values()}
        self._epoll = select.epoll()
        self._done: list[Callable[[], object]] = []
        self._under_way, self.name = 0, "messages"
        #: Called with the rank and tag of a message that comes before its receive.
        self.on_early: Callable[[int, int], object] = lambda rank, tag: None
        for peer in self._peers.values():
            self._register(peer)
        self._closed = weakref.finalize(self, _close, self._epoll, [*connections.values()])
        self._closed.atexit = False
        _open.add(self)

    def send(self, array: Array, peer: int, tag: int, then: Then) -> None:
        self.send_bytes(_bytes_of(array), peer, tag, then)

    def receive(self, array: Array, peer: int, tag: int, then: Then) -> None:
        self._post(peer, tag, _Receive(_bytes_of(array), lambda received: then()))

    def send_bytes(self, data: memoryview, peer: int, tag: int, then: Then = lambda: None) -> None:
        """Begin to send bytes: see `send`."""
        to = self._peers[peer]
        self._require_connected(to)
        self._under_way += 1
        idle = not to.sending
        to.sending += (memoryview(_HEADER.pack(tag, data.nbytes)), data, then)
        if idle:
            self._flush(to)

    def receive_bytes(self, data: memoryview, peer: int, tag: int) -> None:
        """Begin to receive exactly as many bytes as `data` has room for."""

        def received(part: memoryview) -> None:
            if part.nbytes != data.nbytes:
                raise self._mismatch(peer, part.nbytes, data.nbytes)

        self._post(peer, tag, _Receive(data, received))

    def receive_any(self, peer: int, tag: int, then: Callable[[memoryview], object]) -> None:
        """Begin to receive a message of any length; `then` is called with its bytes."""
        self._post(peer, tag, _Receive(None, then))

    def progress(self) -> bool:
        for descriptor, event in self._epoll.poll(0) if self._peers else ():
            peer = self._by_descriptor[descriptor]
            if event & ~_OUT:
                self._read(peer)
            if event & _OUT and peer.lost is None:
                self._flush(peer)
        if not self._done:
            return False
        done, self._done = self._done, []
        self._under_way -= len(done)
        for then in done:
            then()
        return True

    @property
    def under_way(self) -> int:
        return self._under_way

    def watched(self, name: str) -> AbstractContextManager[object]:
        self.name = name
        return self._watched(name, awaited=self.awaited)

    def awaited(self) -> list[int]:
        """Return the world ranks of which this rank waits for a message, or for room. Local."""
        return [
            self._world_ranks[peer.rank]
            for peer in self._peers.values()
            if peer.sending or peer.posted or peer.receive
        ]

    def idle(self, seconds: float) -> None:
        self._epoll.poll(seconds)

    def close(self) -> None:
        """Close all connections. No message may be pending."""
        self._closed()
        self._peers = {}

    def _post(self, rank: int, tag: int, receive: _Receive) -> None:
        peer = self._peers[rank]
        self._under_way += 1
        if tag in peer.kept:
            self._take(peer, tag, receive)
        elif peer.into is not None and peer.receive is None and peer.tag == tag:
            before, peer.receive = peer.into, receive  # its header has come
            peer.into = self._room(peer, receive, before.nbytes)
            peer.into[: peer.got] = before[: peer.got]
        else:
            self._require_connected(peer)
            peer.posted.setdefault(tag, deque()).append(receive)
        self._register(peer)

    def _take(self, peer: _Peer, tag: int, receive: _Receive) -> None:
        """Give a kept message to its receive."""
        data = peer.kept[tag].popleft()
        if not peer.kept[tag]:
            del peer.kept[tag]
        peer.kept_bytes -= data.nbytes
        if receive.array is None:
            self._done.append(partial(receive.then, data))
            return
        into = self._room(peer, receive, data.nbytes)
        into[:] = data
        self._done.append(partial(receive.then, into))

    def _room(self, peer: _Peer, receive: _Receive, nbytes: int) -> memoryview:
        """Return memory for a message of its receive."""
        if receive.array is None:
            return memoryview(bytearray(nbytes))
        if nbytes > receive.array.nbytes:
            raise self._mismatch(peer.rank, nbytes, receive.array.nbytes)
        return receive.array[:nbytes]

    def _begin_message(self, peer: _Peer) -> None:
        """Find the receive of a message whose header has come, or memory to keep the message."""
        (peer.tag, nbytes), peer.got = _HEADER.unpack(peer.header), 0
        posted = peer.posted.get(peer.tag)
        if posted is None:
            self.on_early(peer.rank, peer.tag)
            peer.into = memoryview(bytearray(nbytes))
            return
        peer.receive = posted.popleft()
        if not posted:
            del peer.posted[peer.tag]
        peer.into = self._room(peer, peer.receive, nbytes)

    def _end_message(self, peer: _Peer, received: memoryview) -> None:
        if peer.receive is None:
            peer.kept.setdefault(peer.tag, deque()).append(received)
            peer.kept_bytes += received.nbytes
        else:
            self._done.append(partial(peer.receive.then, received))
        peer.receive, peer.into, peer.got = None, None, 0

    def _read(self, peer: _Peer) -> None:
        """Receive what has come from a rank."""
        for _ in range(_READS):
            if peer.into is None:
                if not self._fill(peer, memoryview(peer.header)):
                    return
                self._begin_message(peer)
            assert peer.into is not None
            if not self._fill(peer, peer.into):
                return
            self._end_message(peer, peer.into)
            if peer.kept_bytes > MOST_KEPT:
                self._register(peer)
                return

    def _fill(self, peer: _Peer, into: memoryview) -> bool:
        """Receive bytes up to the end of a header or message. Return False if some are missing."""
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
        sending = peer.sending
        while sending:
            parts = [part for part in (sending[0], sending[1]) if isinstance(part, memoryview)]
            try:
                count = peer.connection.sendmsg(parts)
            except BlockingIOError:
                break
            except OSError as error:
                self._lose(peer, line_of(error))
                return
            for part in parts:
                if count < part.nbytes:
                    sending[0] = part[count:]
                    break
                count -= part.nbytes
                sending.popleft()
            if not isinstance(sending[0], memoryview):
                self._done.append(cast(Then, sending.popleft()))
        self._register(peer)

    def _register(self, peer: _Peer) -> None:
        """Watch a connection for bytes, unless too many are kept, and for room to send."""
        events = 0 if peer.kept_bytes > MOST_KEPT else _IN
        if peer.sending:
            events |= _OUT
        if events == peer.events or peer.lost is not None:
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
        """Handle the end of a connection: an error if a message is awaited from that rank, or sent.

        A rank that needs no message any more may end before the other ranks.
        """
        peer.lost = why
        if peer.events:
            self._epoll.unregister(peer.connection.fileno())
        if peer.sending or peer.posted or peer.receive is not None:
            self._require_connected(peer)

    def _mismatch(self, peer: int, sent: int, room: int) -> UserError:
        return UserError(
            f"rank {self._world_ranks[peer]} has sent {sent} bytes in {self.name}, but this rank "
            f"expects {room}: the arrays must fit on all ranks"
        )

    def _require_connected(self, peer: _Peer) -> None:
        if peer.lost is None:
            return
        raise PeerFailure(
            f"{rank_in_words(self._world_ranks[peer.rank])} has ended: its program has finished, "
            f"has failed or was killed; found in {self.name} ({peer.lost})"
        )


_open: weakref.WeakSet[TcpMessages] = weakref.WeakSet()


def _close(epoll: select.epoll, connections: Sequence[socket.socket]) -> None:
    epoll.close()
    for connection in connections:
        connection.close()


def _close_in_child() -> None:
    """Close the copies of a forked process: otherwise the end of this rank would stay unseen."""
    for messages in list(_open):
        messages.close()


os.register_at_fork(after_in_child=_close_in_child)


def _bytes_of(array: Array) -> memoryview:
    return memoryview(array.view(np.uint8))
