"""Messages over TCP between every two ranks of a communicator, without a thread.

PyTorch's own messages (`isend`, `irecv`) cannot be polled, and need to know the exact length before
they are received. So ranks have connections of their own: see `connections`.

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
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ...errors import PeerFailure, UserError
from ..liveness.diagnosis import rank_in_words
from ..phrases import waiting_for_finished
from .peer import Key, Peer, Receive, Received, Sent

MOST_KEPT = 64 << 20  #: default of the most bytes from a rank kept without a receive

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT


class Mesh:
    """Messages between every two ranks, matched by sender, channel and tag, in order.

    Args:
        rank: this rank.
        connections: a connected, non-blocking socket for each other rank.
        world_ranks: numbers of the ranks in error texts.
        most_kept: bytes from a rank kept without a receive, above which nothing more is read.

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
        self.rank, self.world_ranks = rank, world_ranks
        self._peers = {
            peer: Peer(peer, world_ranks[peer], connection, most_kept)
            for peer, connection in [*connections.items(), (rank, None)]
        }
        self._by_descriptor = {
            connection.fileno(): self._peers[peer] for peer, connection in connections.items()
        }
        self._lock, self._epoll = threading.RLock(), select.epoll()
        self._lost: list[Peer] = []
        for other in self._by_descriptor.values():
            self._watch(other)
        # The sockets must not be collected before this object.
        self._closed = weakref.finalize(self, _close, self._epoll, [*connections.values()])
        self._closed.atexit = False
        _open.add(self)

    def on_early(self, function: Callable[[int, Key], object]) -> None:
        """Let a function be called with the rank and key of every message without a receive."""
        for peer in self._peers.values():
            peer.on_early = function

    def send(self, data: memoryview, peer: int, key: Key, then: Sent) -> None:
        """Begin to send bytes, which may not change before `then` is called.

        Raises:
            UserError: the connection has ended.
        """
        with self._lock:
            self._require_open()
            to = self._peers[peer]
            if to.connection is None:
                to.deliver(key, data)
                then()
                return
            if to.lost:
                raise self._ended(to, "a message to that rank")
            to.send(key, data, then)
            self._watch(to)

    def receive(self, into: memoryview | None, peer: int, key: Key, then: Received) -> None:
        """Begin to receive a message.

        Args:
            into: room for the message, of any larger size; None: memory of its size.
            then: called with the received bytes.
        """
        with self._lock:
            self._require_open()
            self._peers[peer].post(key, Receive(into, then))
            self._watch(self._peers[peer])

    def cancel(self, peer: int, key: Key) -> None:
        """Withdraw all receives of a key without a message."""
        with self._lock:
            self._peers[peer].cancel(key)
            self._watch(self._peers[peer])

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
            self._peers[peer].take(key)
            self._watch(self._peers[peer])

    def drive(self) -> None:
        """Send and receive what is possible now."""
        with self._lock:
            self._require_open()
            for descriptor, event in self._epoll.poll(0):
                peer = self._by_descriptor[descriptor]
                if event & ~_OUT:
                    peer.read()
                if event & _OUT and not peer.lost:
                    peer.flush()
                self._watch(peer)

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
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # that rank has ended, or has left all unread
                peer.say_end()

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

    def _watch(self, peer: Peer) -> None:
        """Watch a connection for bytes, unless too many are kept, and for room to send.

        The end of a connection is noted only: the rank may have had no more messages.
        """
        if peer.connection is None:
            return
        events = 0 if peer.full else _IN
        if peer.sending:
            events |= _OUT
        if peer.lost:
            events = 0
            if peer not in self._lost:
                self._lost.append(peer)
        if events == peer.events:
            return
        descriptor = peer.connection.fileno()
        if not peer.events:
            self._epoll.register(descriptor, events)
        elif not events:
            self._epoll.unregister(descriptor)
        else:
            self._epoll.modify(descriptor, events)
        peer.events = events

    def _ended(self, peer: Peer, name: str) -> UserError:
        rank, own = peer.name, self.world_ranks[self.rank]
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
