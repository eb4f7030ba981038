"""Messages between ranks of MPI."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from .abort import dead_rank_errors
from .attendance import FAILED, LEFT, sign_off
from .endpoint import (
    HEADER_LENGTH,
    Bytes,
    Endpoint,
    Header,
    OtherLength,
    PeerLost,
    Transfer,
    tags_of,
)
from .messages import pieces_of
from .watchdog import Watchdog

LOST = dead_rank_errors(MPI)

PIECE = 1 << 30  #: bytes: some MPIs count no further than twice this
SILENT_GRACE_S = 10.0
"""How long ranks may take after a server's end, where silent ones keep the job from ending."""


class MpiEndpoint(Endpoint):
    """Each peer's next header is a persistent receive, which is posted before it is sent.

    Args:
        comm: for these messages alone.
        peers: ranks of `comm`.
        serving: whether this side gets requests and sends replies, or the other way round.
        watched: bounds every wait.
        world_ranks: of the world, by rank of `comm`.
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
        self._out, self._in = tags_of(serving)
        self._listening: set[int] = set()
        self._lost: set[int] = set()
        self._failed: list[int] = []  # those of them that nobody has been told of
        # Room for longer ones, of another version say: they are refused like any other nonsense.
        self._headers = np.zeros((len(self.peers), 4 * HEADER_LENGTH), np.int64)
        self._places = {peer: i for i, peer in enumerate(self.peers)}
        self._requests: list[MPI.Request] = [
            comm.Recv_init(header, peer, self._in)
            for peer, header in zip(self.peers, self._headers, strict=True)
        ]
        for peer in self.peers:
            self.listen(peer)

    def listen(self, peer: int) -> None:
        if peer in self._lost:
            return
        request = self._requests[self._places[peer]]
        assert isinstance(request, MPI.Prequest)
        request.Start()
        self._listening.add(peer)

    def arrivals(self) -> list[tuple[int, Header]]:
        arrived: list[tuple[int, Header]] = []
        status = MPI.Status()
        try:
            while True:
                place, came = MPI.Request.Testany(self._requests, status)
                if not came or place == MPI.UNDEFINED:
                    break
                length = status.Get_count(MPI.INT64_T)
                arrived.append((self.peers[place], self._headers[place, :length].copy()))
                self._listening.discard(self.peers[place])
        except MPI.Exception as error:
            self._note_failed(error)
        if not arrived and self._failed:
            raise PeerLost(self._failed.pop())
        return arrived

    def _note_failed(self, error: MPI.Exception) -> None:
        """Find out who has died, and stop listening to them."""
        if error.Get_error_class() not in LOST:
            raise error
        failed = self._comm.Get_failed()
        self._comm.Ack_failed(failed.size)
        ranks = failed.Translate_ranks(None, self._comm.group)
        for peer in self._places.keys() & set(ranks) - self._lost:
            self._lost.add(peer)
            self._failed.append(peer)
            self._requests[self._places[peer]] = MPI.REQUEST_NULL

    def receive(self, peer: int, body: Bytes) -> Transfer:
        pieces = _pieces_of(body)
        requests = [self._comm.Irecv(piece, peer, self._in + 1) for piece in pieces]
        return MpiTransfer(peer, requests, pieces, received=True)

    def body_here(self, peer: int) -> int:
        here = self._next_piece(peer) or 0
        return here if here < PIECE else 0  # there may be more

    def discard(self, peer: int) -> None:
        while (length := self._next_piece(peer)) is not None:
            with self.watched("a message that nobody expects", peer):  # its end may be on its way
                self._comm.Recv(np.empty(length, np.uint8), peer, self._in + 1)

    def _next_piece(self, peer: int) -> int | None:
        """The bytes of the next piece of a body; None where there is none, or no peer any more."""
        status = MPI.Status()
        try:
            here = self._comm.Iprobe(peer, self._in + 1, status)
        except MPI.Exception as error:
            if error.Get_error_class() not in LOST:
                raise
            return None
        return status.Get_count(MPI.BYTE) if here else None

    def send(self, peer: int, header: Header, body: Bytes | None = None) -> Transfer:
        # The body first: with its header it is here too, and `discard` finds it.
        pieces = _pieces_of(body)
        requests = [self._comm.Isend(piece, peer, self._out + 1) for piece in pieces]
        requests.append(self._comm.Isend(header, peer, self._out))
        return MpiTransfer(peer, requests, [*pieces, header])

    def close(self) -> None:
        for peer, place in self._places.items():
            request = self._requests[place]
            if request == MPI.REQUEST_NULL:
                continue
            if peer in self._listening:
                request.Cancel()
                request.Wait()
            request.Free()
            self._requests[place] = MPI.REQUEST_NULL

    def leave_lost(self, *, silent: bool = False) -> None:
        atexit.register(_end_silent if silent else _end_now)

    def watched(self, name: str, peer: int) -> AbstractContextManager[object]:
        return self._watched(name, peer=self._in_world[peer])

    def show_stacks(self, peer: int, why: str) -> None:
        self._watched.show_stacks(self._in_world[peer], why)

    def left(self) -> list[int]:
        return [peer for peer, rank in self._in_world.items() if self._watched.has_left(rank)]

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)


def _pieces_of(body: Bytes | None) -> list[Bytes]:
    """As a body is sent; one of no bytes is none."""
    return pieces_of(body, PIECE) if body is not None and body.size else []


def _end_now() -> None:
    """End the process without MPI_Finalize, which hangs where ranks are missing."""
    sign_off(LEFT)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_silent() -> None:
    """End the whole job, a while after this rank: mpiexec would wait for silent ranks forever."""
    time.sleep(SILENT_GRACE_S)
    print(
        "parallel_sgd: all is done but for ranks that were silent: ending the job",
        file=sys.stderr,
        flush=True,
    )
    sign_off(FAILED)
    MPI.COMM_WORLD.Abort(1)


class MpiTransfer:
    """Requests of one message, each with its array.

    Args:
        received: whether the arrays are to be filled to their ends.

    Each request is asked for by itself: of several at once an MPI may not tell what went wrong.
    """

    def __init__(
        self,
        peer: int,
        requests: Sequence[MPI.Request],
        arrays: Sequence[npt.NDArray[Any]],
        *,
        received: bool = False,
    ) -> None:
        self.peer, self._received = peer, received
        self._rest = list(zip(requests, arrays, strict=True))

    def done(self) -> bool:
        status = MPI.Status()
        while self._rest:
            request, array = self._rest[-1]
            try:
                if not request.Test(status):
                    return False
            except MPI.Exception as error:
                raise self._meant(error) from error
            self._rest.pop()
            if self._received and status.Get_count(MPI.BYTE) != array.nbytes:
                raise OtherLength
        return True

    def _meant(self, error: MPI.Exception) -> Exception:
        if error.Get_error_class() in LOST:
            return PeerLost(self.peer)
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            self._rest.pop()
            return OtherLength()
        return error
