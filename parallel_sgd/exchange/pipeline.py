"""An exchange in which encoding, messages, sums and decoding of different pieces overlap.

Every rank has some pieces to contribute, some to total, and all to take; it does whatever is
possible next, and in between moves its messages on. What others wait for comes first: totals, then
contributions, then what is for this rank alone.

A link that many send to at once loses packets, and takes longer. So a rank contributes to one owner
after the other, beginning with the one after it, as in a ring, and owners receive in just that
order; and between hosts a rank sends only so much of its contributions, and receives only so much
of each kind of message, at a time as keeps a link busy (`WINDOW`). Of all contributions that are
missing the first, by that order, can always be sent and received, and no result holds up a
contribution, nor a result of another host: no rank waits for itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from ..communication import Communicator
from ..communication.messages import Messages, Then
from .pieces import Piece
from .residuals import Residuals
from .routes import Routes
from .stages import Stages

Array = Any  #: a NumPy or CuPy array

VALUES, CONTRIBUTION, RESULT = range(3)  #: kinds of messages
KINDS = 3

WINDOW = 2 << 20
"""Bytes of a kind that are sent, or expected, at a time: what a link holds, and some more."""


class Pipeline:
    """Sums vectors of one layout, by pieces.

    Args:
        stages: of every bucket, in the order in which their values are ready.
        routes: who gathers for whom.
        comm: the ranks; nothing else may send messages on it meanwhile.

    Attributes:
        bytes_sent: by this rank to others, over all exchanges so far.
        orders: of every bucket, its pieces by their owners from this rank on, itself at the end.

    Local.
    """

    def __init__(self, stages: Sequence[Stages], routes: Routes, comm: Communicator) -> None:
        self.stages, self.routes, self.comm = stages, routes, comm
        self.messages = comm.messages()
        self.bytes_sent = 0
        self.orders = [
            sorted(each.pieces, key=lambda piece: (piece.owner - comm.rank - 1) % comm.size)
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
        self.messages.enter()
        run, messages, trace = _Run(self, vector, residuals), self.messages, self.comm.trace
        sent_before = self.bytes_sent
        computing, waiting = messages.backoff(computing=True), messages.backoff()
        for bucket in range(len(self.stages)):
            while is_ready is not None and not is_ready(bucket):  # it is this rank that is late
                if messages.progress() or run.work():
                    computing.reset()
                else:
                    computing.pause()
            run.begin(bucket, stray=stray)
        while run.left or messages.under_way:
            moved, worked = messages.progress(), run.work()
            if moved or worked:
                continue
            waiting.reset()
            with trace.span("wait"), messages.watched("exchange"):
                while not messages.progress():
                    waiting.pause()
        if run.wire_s:  # beside what this thread does meanwhile
            sent = self.bytes_sent - sent_before
            trace.record("wire", *run.wire_s, row="wire", bytes=sent)


class _Run:
    """One exchange under way.

    Attributes:
        left: pieces that have not been taken.
        wire_s: when the first message was sent and the last result was here; None: no messages.
    """

    def __init__(self, pipeline: Pipeline, vector: Array, residuals: Residuals | None) -> None:
        self.pipeline, self.vector, self.residuals = pipeline, vector, residuals
        self.messages, self.rank = pipeline.messages, pipeline.comm.rank
        self.trace, self.routes = pipeline.comm.trace, pipeline.routes
        self.host = self.routes.host_of[self.rank]
        self.left = sum(len(each.pieces) for each in pipeline.stages)
        self._local = [each for each in self.routes.hosts[self.host] if each != self.rank]
        self._sending = 0  # bytes of contributions
        self.wire_s: tuple[float, float] | None = None
        self._to_contribute: deque[tuple[Stages, Piece]] = deque()
        self._to_total: deque[tuple[Stages, Piece]] = deque()
        self._to_take: deque[tuple[Stages, Piece]] = deque()
        self._missing_values: dict[int, int] = {}
        self._missing_contributions: dict[int, int] = {}
        self._values = _Expected(self.messages, VALUES)
        self._contributions = _Expected(self.messages, CONTRIBUTION)
        self._results = _Expected(self.messages, RESULT)
        for stages, order in zip(pipeline.stages, pipeline.orders, strict=True):
            self._expect_values(stages, order)
            self._expect_contributions(stages)

    def _expect_values(self, stages: Stages, order: Sequence[Piece]) -> None:
        """Of the other ranks of this host, for the pieces that this one gathers."""
        for piece in order:
            if not stages.gathers(piece):
                continue
            self._to_contribute.append((stages, piece))
            self._missing_values[piece.tag] = 1 + len(self._local)
            came = partial(self._has_values, piece)
            for peer in self._local:
                self._values.add(stages.gather_room(piece, peer), peer, piece, came)

    def _expect_contributions(self, stages: Stages) -> None:
        """Of the other hosts, for the pieces that this rank owns: in the order in which they are
        sent, those from the rank before this one first."""
        expected = []
        for piece in stages.pieces:
            if piece.owner != self.rank:
                continue
            self._missing_contributions[piece.tag] = len(self.routes.hosts)
            came = partial(self._has_contribution, stages, piece)
            for host in range(len(self.routes.hosts)):
                if host != self.host:
                    sender = self.routes.gatherer(host, piece.owner)
                    room = stages.contribution_room(piece, host)
                    expected.append((room, sender, piece, came))
        expected.sort(key=lambda each: (self.rank - each[1]) % self.pipeline.comm.size)
        for room, sender, piece, came in expected:
            self._contributions.add(room, sender, piece, came)

    def begin(self, bucket: int, *, stray: bool) -> None:
        """The values of a bucket are there."""
        stages = self.pipeline.stages[bucket]
        for piece in self.pipeline.orders[bucket]:
            gatherer = self.routes.gatherer(self.host, piece.owner)
            if gatherer == self.rank:
                self._has_values(piece)
                continue
            values = self.vector[piece.values]
            if stray and self.residuals is not None:
                values += self.residuals.own[piece.values]
                self.residuals.own[piece.values] = 0
            sent = partial(self._await_result, stages, piece, gatherer)
            self._send(values, gatherer, piece, VALUES, sent)

    def work(self) -> bool:
        """Do what is next; whether there was anything."""
        if self._to_total:
            self._total(*self._to_total.popleft())
        elif self._may_contribute():
            self._contribute(*self._to_contribute.popleft())
        elif self._to_take:
            self._take(*self._to_take.popleft())
        else:
            return False
        return True

    def _may_contribute(self) -> bool:
        if not self._to_contribute or self._sending >= WINDOW:
            return False
        _, piece = self._to_contribute[0]
        return self._missing_values[piece.tag] == 0

    def _has_values(self, piece: Piece) -> None:
        self._missing_values[piece.tag] -= 1

    def _contribute(self, stages: Stages, piece: Piece) -> None:
        if self._local:
            with self.trace.span("sum"):
                stages.gather(piece, self.vector)
        with self.trace.span("encode"):
            message = stages.contribute(piece, self.vector, self.residuals)
        if piece.owner == self.rank:
            self._has_contribution(stages, piece)
            return
        self._sending += message.nbytes
        sent = partial(self._contributed, stages, piece, message.nbytes)
        self._send(message, piece.owner, piece, CONTRIBUTION, sent)

    def _contributed(self, stages: Stages, piece: Piece, nbytes: int) -> None:
        self._sending -= nbytes
        self._await_result(stages, piece, piece.owner)

    def _has_contribution(self, stages: Stages, piece: Piece) -> None:
        self._missing_contributions[piece.tag] -= 1
        if self._missing_contributions[piece.tag] == 0:
            self._to_total.append((stages, piece))

    def _total(self, stages: Stages, piece: Piece) -> None:
        with self.trace.span("sum"):
            message = stages.total(piece, self.vector, self.residuals)
        hosts = len(self.routes.hosts)
        for host in ((self.host + step) % hosts for step in range(1, hosts)):  # as in a ring
            self._send(message, self.routes.gatherer(host, piece.owner), piece, RESULT)
        self._pass_on(message, stages, piece)

    def _await_result(self, stages: Stages, piece: Piece, sender: int) -> None:
        """What this rank had to send has been sent: its place is free for what comes back."""
        room = stages.result_room(piece, self.vector)
        came = partial(self._has_result, stages, piece)
        if sender in self._local:  # over no link; and it may itself wait for its turn of a window
            self.messages.receive(room, sender, tag_of(piece, RESULT), came)
        else:
            self._results.add(room, sender, piece, came)

    def _has_result(self, stages: Stages, piece: Piece) -> None:
        assert self.wire_s is not None
        self.wire_s = (self.wire_s[0], perf_counter())
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

    def _send(
        self, array: Array, peer: int, piece: Piece, kind: int, then: Then = lambda: None
    ) -> None:
        now = perf_counter()
        self.wire_s = (self.wire_s[0] if self.wire_s else now, now)
        self.pipeline.bytes_sent += array.nbytes
        self.messages.send(array, peer, tag_of(piece, kind), then)


class _Expected:
    """Messages of one kind to be received, of which `WINDOW` bytes may come at a time."""

    def __init__(self, messages: Messages, kind: int) -> None:
        self._messages, self._kind = messages, kind
        self._later: deque[tuple[Array, int, Piece, Then]] = deque()
        self._coming = 0  # bytes

    def add(self, room: Array, sender: int, piece: Piece, then: Then) -> None:
        """The next one, where it goes, and what to do when it is there."""
        self._later.append((room, sender, piece, then))
        self._receive()

    def _receive(self) -> None:
        while self._later and self._coming < WINDOW:
            room, sender, piece, then = self._later.popleft()
            self._coming += room.nbytes
            came = partial(self._came, room.nbytes, then)
            self._messages.receive(room, sender, tag_of(piece, self._kind), came)

    def _came(self, nbytes: int, then: Then) -> None:
        self._coming -= nbytes
        then()
        self._receive()


def tag_of(piece: Piece, kind: int) -> int:
    """Of a message, the same on all ranks."""
    return KINDS * piece.tag + kind
