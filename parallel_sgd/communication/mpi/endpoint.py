"""Requests and replies between MPI ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from ..endpoint import (
    HEADER_LENGTH,
    Bytes,
    Endpoint,
    Header,
    OtherLength,
    Transfer,
    send_and_receive_tags,
)
from ..liveness.watchdog import Watchdog
from ..messages import pieces_of

PIECE = 1 << 30  #: most bytes of a message: some MPIs count only to 2^31


class MpiEndpoint(Endpoint):
    """Endpoint over MPI, with a persistent receive posted for each peer's next header.

    Args:
        comm: communicator for these messages only.
        peers: ranks of `comm`.
        serving: receive requests and send replies, instead of the reverse.
        watched: bounds every wait.
        world_ranks: world rank for each rank of `comm`.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        peers: Sequence[int],
        serving: bool,
        watched: Watchdog,
        world_ranks: Sequence[int],
    ) -> None:
        self.peers, self.timeout_s, self._watched = tuple(peers), watched.timeout_s, watched
        self._in_world = {peer: world_ranks[peer] for peer in self.peers}
        self._comm, self.rank = comm, comm.rank
        self._out, self._in = send_and_receive_tags(serving)
        self._listening: set[int] = set()
        # Room for longer headers, such as those of another version: refused as invalid.
        self._headers = np.zeros((len(self.peers), 4 * HEADER_LENGTH), np.int64)
        self._places = {peer: i for i, peer in enumerate(self.peers)}
        self._requests: list[MPI.Request] = [
            comm.Recv_init(header, peer, self._in)
            for peer, header in zip(self.peers, self._headers, strict=True)
        ]
        for peer in self.peers:
            self.listen(peer)

    def listen(self, peer: int) -> None:
        request = self._requests[self._places[peer]]
        assert isinstance(request, MPI.Prequest)
        request.Start()
        self._listening.add(peer)

    def arrivals(self) -> list[tuple[int, Header]]:
        arrived: list[tuple[int, Header]] = []
        status = MPI.Status()
        try:
            # bounded: as long as messages are here
            while True:
                place, completed = MPI.Request.Testany(self._requests, status)
                if not completed or place == MPI.UNDEFINED:
                    break
                length = status.Get_count(MPI.INT64_T)
                arrived.append((self.peers[place], self._headers[place, :length].copy()))
                self._listening.discard(self.peers[place])
        except MPI.Exception as error:
            self._raise_rank_failure(error)
            raise
        return arrived

    def _raise_rank_failure(self, error: MPI.Exception) -> None:
        self._watched.raise_rank_failure(error, "messages")

    def receive(self, peer: int, body: Bytes) -> Transfer:
        pieces = _pieces_of(body)
        requests = [self._comm.Irecv(piece, peer, self._in + 1) for piece in pieces]
        transfer = MpiTransfer(peer, requests, pieces, self._raise_rank_failure, received=True)
        return self._track(transfer)

    def _track(self, transfer: MpiTransfer) -> MpiTransfer:
        return transfer

    def next_body_length(self, peer: int) -> int:
        here = self._next_piece(peer) or 0
        return here if here < PIECE else 0  # a full piece: more may follow

    def discard(self, peer: int) -> None:
        while (length := self._next_piece(peer)) is not None:
            with self.watched("an unexpected message", peer):  # its end may be in flight
                self._comm.Recv(np.empty(length, np.uint8), peer, self._in + 1)

    def _next_piece(self, peer: int) -> int | None:
        """Return the bytes of the next piece of a body, or None if there is none.

        Raises:
            RanksLost: the peer has failed.
        """
        status = MPI.Status()
        try:
            here = self._comm.Iprobe(peer, self._in + 1, status)
        except MPI.Exception as error:
            self._raise_rank_failure(error)
            raise
        return status.Get_count(MPI.BYTE) if here else None

    def send(self, peer: int, header: Header, body: Bytes | None = None) -> Transfer:
        # The body first: it has arrived when its header has, and `discard` finds it.
        pieces = _pieces_of(body)
        requests = [self._comm.Isend(piece, peer, self._out + 1) for piece in pieces]
        requests.append(self._comm.Isend(header, peer, self._out))
        transfer = MpiTransfer(peer, requests, [*pieces, header], self._raise_rank_failure)
        return self._track(transfer)

    def close(self) -> None:
        for peer, place in self._places.items():
            request = self._requests[place]
            if request == MPI.REQUEST_NULL:
                continue
            if peer in self._listening:
                request.Cancel()
                # bounded: of a receive that was cancelled: local
                request.Wait()
            request.Free()
            self._requests[place] = MPI.REQUEST_NULL

    def watched(self, name: str, peer: int) -> AbstractContextManager[object]:
        return self._watched(name, peer=self._in_world[peer])

    def continues_without(self, peer: int) -> bool:
        return self._watched.continues_without(self._in_world[peer])

    def show_stacks(self, peer: int, why: str) -> None:
        self._watched.show_stacks(self._in_world[peer], why)

    def finished_peers(self) -> list[int]:
        return [peer for peer, rank in self._in_world.items() if self._watched.has_finished(rank)]

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)


def _pieces_of(body: Bytes | None) -> list[Bytes]:
    """Cut a body into pieces for sending. An empty body has none."""
    return pieces_of(body, PIECE) if body is not None and body.size else []


class MpiTransfer:
    """Pending MPI requests of a message, each with its array.

    Args:
        peer: the remote rank.
        requests, arrays: the requests, each with its array.
        raise_rank_failure: called with an error of MPI; raises `RanksLost` for a failed rank.
        received: the arrays must be filled completely.

    Attributes:
        rest: requests not yet complete.

    Each request is tested separately: for several at once MPI may not report the error.
    """

    def __init__(
        self,
        peer: int,
        requests: Sequence[MPI.Request],
        arrays: Sequence[npt.NDArray[Any]],
        raise_rank_failure: Callable[[MPI.Exception], object],
        *,
        received: bool = False,
    ) -> None:
        self.peer, self._received = peer, received
        self._raise_rank_failure = raise_rank_failure
        self.rest = list(zip(requests, arrays, strict=True))

    def done(self) -> bool:
        status = MPI.Status()
        # bounded: as long as parts of it are done
        while self.rest:
            request, array = self.rest[-1]
            try:
                if not request.Test(status):
                    return False
            except MPI.Exception as error:
                if error.Get_error_class() == MPI.ERR_TRUNCATE:
                    self.rest.pop()
                    raise OtherLength from error
                self._raise_rank_failure(error)
                raise
            self.rest.pop()
            if self._received and status.Get_count(MPI.BYTE) != array.nbytes:
                raise OtherLength
        return True
