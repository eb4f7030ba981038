"""An exchange in which encoding, messages, sums and decoding of different pieces overlap.

Every rank has some pieces to contribute, some to total, and all to take; it does whatever is
possible next, and in between moves its messages on. What others wait for comes first: totals, then
contributions, then what is for this rank alone. Contributions begin with the owner after this rank,
so that not all ranks send to the same one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..communication import Communicator
from ..communication.messages import Naps
from .pieces import Piece
from .residuals import Residuals
from .routes import Routes
from .stages import Stages

Array = Any  #: a NumPy or CuPy array

VALUES, CONTRIBUTION, RESULT = range(3)  #: kinds of messages
KINDS = 3

WINDOW = 4 << 20
"""Bytes on their way from this rank, beyond which it contributes no more: what is sent all at once
to everybody takes longer, since many flows then meet in one link."""


class Pipeline:
    """Sums vectors of one layout, by pieces.

    Args:
        stages: of every bucket, in the order in which their values are ready.
        routes: who gathers for whom.
        comm: the ranks; nothing else may send messages on it meanwhile.

    Local.
    """

    def __init__(self, stages: Sequence[Stages], routes: Routes, comm: Communicator) -> None:
        self.stages, self.routes, self.comm = stages, routes, comm
        self.messages = comm.messages()
        self.bytes_sent = 0  #: by this rank to others, over all exchanges so far
        size, rank = comm.size, comm.rank
        #: By bucket: (index within its stripe, owner counted from this rank on).
        self.orders = [
            sorted(each.pieces, key=partial(_turn, _places(each.pieces), rank, size))
            for each in stages
        ]

    def sum(
        self,
        vector: Array,
        residuals: Residuals | None,
        is_ready: Callable[[int], bool] | None = None,
        *,
        stray: bool = False,
    ) -> None:
        """Replace `vector` by its sum over all ranks, the same bits on all.

        Args:
            vector: [n], finite.
            residuals: updated; None where nothing is lost.
            is_ready: whether the values of a bucket, by its number, are there; asked in their
                order, until it is so. None: all are.
            stray: add residuals to values that this rank does not gather, and forget them.

        Collective.
        """
        run, naps, messages = _Run(self, vector, residuals), Naps(), self.messages
        for bucket in range(len(self.stages)):
            while is_ready is not None and not is_ready(bucket):  # it is this rank that is late
                if messages.progress() or run.work():
                    naps.reset()
                else:
                    naps.pause(messages)
            run.begin(bucket, stray=stray)
        while run.left or messages.under_way:
            if messages.progress() | run.work():
                continue
            naps.reset()
            with self.comm.trace.span("wait"), messages.watched("exchange"):
                while not messages.progress():
                    naps.pause(messages)


class _Run:
    """One exchange under way.

    Attributes:
        left: pieces that have not been taken.
    """

    def __init__(self, pipeline: Pipeline, vector: Array, residuals: Residuals | None) -> None:
        self.pipeline, self.vector, self.residuals = pipeline, vector, residuals
        self.messages, self.rank = pipeline.messages, pipeline.comm.rank
        self.trace = pipeline.comm.trace
        self.left = sum(len(each.pieces) for each in pipeline.stages)
        self._to_contribute: deque[tuple[Stages, Piece]] = deque()
        self._to_total: deque[tuple[Stages, Piece]] = deque()
        self._to_take: deque[tuple[Stages, Piece]] = deque()
        self._sending = 0  # bytes
        self._missing_values: dict[int, int] = {}
        self._missing_contributions: dict[int, int] = {}
        routes = pipeline.routes
        here = routes.host_of[self.rank]
        self._local = [each for each in routes.hosts[here] if each != self.rank]
        for stages in pipeline.stages:
            for piece in stages.pieces:
                if stages.gathers(piece):
                    self._missing_values[piece.tag] = 1 + len(self._local)
                    came = partial(self._has_values, stages, piece)
                    for peer in self._local:
                        self._receive(stages.gather_room(piece, peer), peer, piece, VALUES, came)
                if piece.owner == self.rank:
                    self._missing_contributions[piece.tag] = len(routes.hosts)
                    came = partial(self._has_contribution, stages, piece)
                    for host in range(len(routes.hosts)):
                        if host != here:
                            gatherer = routes.gatherer(host, piece.owner)
                            room = stages.contribution_room(piece, host)
                            self._receive(room, gatherer, piece, CONTRIBUTION, came)

    def begin(self, bucket: int, *, stray: bool) -> None:
        """The values of a bucket are there."""
        stages, routes = self.pipeline.stages[bucket], self.pipeline.routes
        here = routes.host_of[self.rank]
        for piece in self.pipeline.orders[bucket]:
            gatherer = routes.gatherer(here, piece.owner)
            if gatherer == self.rank:
                self._has_values(stages, piece)
            else:
                values = self.vector[piece.values]
                if stray and self.residuals is not None:
                    values += self.residuals.own[piece.values]
                    self.residuals.own[piece.values] = 0
                then = partial(self._await_result, stages, piece, gatherer)
                self._send(values, gatherer, piece, VALUES, then)

    def work(self) -> bool:
        """Do what is next; whether there was anything."""
        if self._to_total:
            self._total(*self._to_total.popleft())
        elif self._to_contribute and self._sending < WINDOW:
            self._contribute(*self._to_contribute.popleft())
        elif self._to_take:
            self._take(*self._to_take.popleft())
        else:
            return False
        return True

    def _has_values(self, stages: Stages, piece: Piece) -> None:
        self._missing_values[piece.tag] -= 1
        if self._missing_values[piece.tag] == 0:
            self._to_contribute.append((stages, piece))

    def _contribute(self, stages: Stages, piece: Piece) -> None:
        if self._local:
            with self.trace.span("sum"):
                stages.gather(piece, self.vector)
        with self.trace.span("encode"):
            message = stages.contribute(piece, self.vector, self.residuals)
        if piece.owner == self.rank:
            self._has_contribution(stages, piece)
        else:
            then = partial(self._await_result, stages, piece, piece.owner)
            self._send(message, piece.owner, piece, CONTRIBUTION, then)

    def _has_contribution(self, stages: Stages, piece: Piece) -> None:
        self._missing_contributions[piece.tag] -= 1
        if self._missing_contributions[piece.tag] == 0:
            self._to_total.append((stages, piece))

    def _total(self, stages: Stages, piece: Piece) -> None:
        with self.trace.span("sum"):
            message = stages.total(piece, self.vector, self.residuals)
        routes = self.pipeline.routes
        for host in self._from_here(len(routes.hosts), routes.host_of[self.rank]):
            gatherer = routes.gatherer(host, piece.owner)
            if gatherer != self.rank:
                self._send(message, gatherer, piece, RESULT)
        self._pass_on(message, stages, piece)

    def _await_result(self, stages: Stages, piece: Piece, sender: int) -> None:
        """What this rank has had to send is on its way; its place is free for what comes back."""
        room = stages.result_room(piece, self.vector)
        self._receive(room, sender, piece, RESULT, partial(self._has_result, stages, piece))

    def _has_result(self, stages: Stages, piece: Piece) -> None:
        if stages.gathers(piece):
            self._pass_on(stages.result_room(piece, self.vector), stages, piece)
        else:
            self._to_take.append((stages, piece))

    def _pass_on(self, message: Array, stages: Stages, piece: Piece) -> None:
        """To the other ranks of this host."""
        for peer in self._local:
            self._send(message, peer, piece, RESULT)
        self._to_take.append((stages, piece))

    def _take(self, stages: Stages, piece: Piece) -> None:
        with self.trace.span("decode"):
            stages.take(piece, self.vector)
        self.left -= 1

    def _from_here(self, size: int, own: int) -> list[int]:
        return [(own + i) % size for i in range(1, size + 1)]

    def _send(
        self,
        array: Array,
        peer: int,
        piece: Piece,
        kind: int,
        then: Callable[[], object] = lambda: None,
    ) -> None:
        nbytes = array.nbytes

        def sent() -> None:
            self._sending -= nbytes
            then()

        self.pipeline.bytes_sent += nbytes
        self._sending += nbytes
        self.messages.send(array, peer, KINDS * piece.tag + kind, sent)

    def _receive(
        self, room: Array, peer: int, piece: Piece, kind: int, then: Callable[[], object]
    ) -> None:
        self.messages.receive(room, peer, KINDS * piece.tag + kind, then)


def _places(pieces: Sequence[Piece]) -> dict[int, int]:
    """The number of each piece within its stripe, by tag."""
    places: dict[int, int] = {}
    counts: dict[int, int] = {}
    for piece in pieces:
        places[piece.tag] = counts.get(piece.owner, 0)
        counts[piece.owner] = places[piece.tag] + 1
    return places


def _turn(places: dict[int, int], rank: int, size: int, piece: Piece) -> tuple[int, int]:
    return places[piece.tag], (piece.owner - rank - 1) % size
