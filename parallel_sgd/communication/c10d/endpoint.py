"""Requests and replies between ranks over a `Mesh`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ..endpoint import Bytes, Endpoint, Header, OtherLength, Transfer, send_and_receive_tags
from ..liveness.finish import ON_ITS_WAY_S
from ..liveness.watchdog import Watchdog
from .mesh import Mesh
from .messages import bytes_of
from .peer import ENDPOINT


class MeshEndpoint(Endpoint):
    """Endpoint over a mesh. A body comes just before its header, and is kept for its array.

    Args:
        mesh: connections of the ranks.
        peers: the ranks at the remote side.
        serving: receive requests and send replies, instead of the reverse.
        watched: bounds every wait.
    """

    def __init__(self, mesh: Mesh, peers: Sequence[int], serving: bool, watched: Watchdog) -> None:
        self.rank, self.peers, self.timeout_s = mesh.rank, tuple(peers), watched.timeout_s
        self._mesh, self._watched = mesh, watched
        self._awaited: tuple[str, int] | None = None  #: name of the present wait, and its peer
        self._finished_since = 0.0  #: when this wait found its peer finished
        send, receive = send_and_receive_tags(serving)
        self._out, self._out_body = (ENDPOINT, send), (ENDPOINT, send + 1)
        self._in, self._in_body = (ENDPOINT, receive), (ENDPOINT, receive + 1)
        self._arrived: list[tuple[int, Header]] = []
        for peer in self.peers:
            self.listen(peer)

    def listen(self, peer: int) -> None:
        def arrived(data: memoryview) -> None:
            self._arrived.append((peer, np.frombuffer(data, np.int64)))

        self._mesh.receive(None, peer, self._in, arrived)

    def arrivals(self) -> list[tuple[int, Header]]:
        self.drive()
        arrived = self._arrived[:]
        del self._arrived[: len(arrived)]
        return arrived

    def drive(self) -> None:
        """Send and receive what is possible now.

        Raises:
            PeerFailure: a rank has failed.
            UserError: the awaited peer has finished, `ON_ITS_WAY_S` ago. Until then another thread
                of this rank may be handling its last message.
        """
        self._mesh.drive()
        name, peer = self._awaited or ("messages", None)
        problem = self._mesh.failure(name)
        if problem is not None and not self._arrived:
            raise problem
        if peer in self._mesh.finished:
            now = time.monotonic()
            self._finished_since = self._finished_since or now
            if now - self._finished_since > ON_ITS_WAY_S:
                self._mesh.require_unfinished(peer, name)

    def receive(self, peer: int, body: Bytes) -> Transfer:
        return _Received(self, peer, body)

    def take_body(self, peer: int) -> memoryview | None:
        """Remove and return the next body from a peer, or return None if there is none."""
        data = self._mesh.kept(peer, self._in_body)
        if data is not None:
            self._mesh.discard(peer, self._in_body)
        return data

    def next_body_length(self, peer: int) -> int:
        data = self._mesh.kept(peer, self._in_body)
        return 0 if data is None else data.nbytes

    def discard(self, peer: int) -> None:
        while self.take_body(peer) is not None:
            pass

    def send(self, peer: int, header: Header, body: Bytes | None = None) -> Transfer:
        sent = _Sent(self, peer)
        if body is not None and body.size:
            self._mesh.send(bytes_of(body), peer, self._out_body, lambda: None)
        self._mesh.send(bytes_of(header), peer, self._out, sent.end)
        return sent

    def close(self) -> None:
        for peer in self.peers:
            self._mesh.cancel(peer, self._in)

    @contextmanager
    def watched(self, name: str, peer: int) -> Iterator[None]:
        self._awaited, self._finished_since = (name, peer), 0.0
        try:
            with self._watched(name, peer=self._mesh.world_ranks[peer]):
                yield
        finally:
            self._awaited = None

    def finished_peers(self) -> list[int]:
        return [peer for peer in self._mesh.finished if peer in self.peers]

    def idle(self, seconds: float) -> None:
        self._mesh.idle(seconds)


class _Sent:
    """A message being sent. Its header is sent last."""

    def __init__(self, endpoint: MeshEndpoint, peer: int) -> None:
        self.peer, self._endpoint, self._ended = peer, endpoint, False

    def end(self) -> None:
        self._ended = True

    def done(self) -> bool:
        if not self._ended:
            self._endpoint.drive()
        return self._ended


class _Received:
    """A body to receive."""

    def __init__(self, endpoint: MeshEndpoint, peer: int, body: Bytes) -> None:
        self.peer, self._endpoint, self._body, self._ended = peer, endpoint, body, False

    def done(self) -> bool:
        if self._ended:
            return True
        data = self._endpoint.take_body(self.peer)
        if data is None:
            self._endpoint.drive()
            return False
        self._ended = True
        if data.nbytes != self._body.nbytes:
            raise OtherLength
        self._body[...] = np.frombuffer(data, np.uint8)
        return True
