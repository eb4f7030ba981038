"""The schedule of an exchange: the order of the pieces' work, and the limit on bytes in flight.

Work that ranks wait for comes first: owners reduce, then local leaders encode. Decoding comes last,
since only the rank itself needs the result.

A link loses packets and slows down if many ranks send to one rank at once. A rank therefore encodes
for one owner after another, beginning with the next rank, as in a ring, and owners receive in the
matching order. Between hosts, the encoded bytes being sent and the bytes expected of each kind of
message are limited to `WINDOW`, enough to keep a link busy.

The limits cannot cause a deadlock:

- Pieces are encoded in the order in which they began, whatever arrives first. So the first missing
  encoded message in this order can always be sent and received.
- No result delays an encoded message, or a result from another host: results have no window at the
  sender. Results within a host have no window at the receiver either, because the rank that passes
  the result on may itself be waiting for room in a window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

from .. import runtime
from ..communication.messages import Messages, Then
from .layout import Piece

Array = Any  #: a NumPy or CuPy array

VALUES, ENCODED, REDUCED = range(3)  #: kinds of messages; as waits: for all messages of the kind
SENT = 3  #: wait until this rank's own message is sent, and its buffer free
ENCODE, REDUCE, DECODE = range(4, 7)  #: wait for a turn to do so
ALL_ARRIVED = 7  #: wait until all pieces have arrived at a `Barrier`

WINDOW = 2 << 20
"""Bytes of a kind sent, or expected, at a time: somewhat more than a link holds."""


class Task:
    """The state of a piece in the exchange.

    Args:
        piece: the piece.
        values, encoded: the number of messages of these kinds, including this rank's own.

    Attributes:
        steps: a generator of the piece's work, which yields before each wait.
        missing: the number of missing messages, by VALUES, ENCODED, REDUCED and SENT.
        awaited: the awaited kind of message, or -1.
        barrier: the last barrier reached by the piece, or None.
    """

    __slots__ = ("awaited", "barrier", "missing", "piece", "steps")

    steps: Iterator[int]

    def __init__(self, piece: Piece, values: int, encoded: int) -> None:
        self.piece, self.missing = piece, [values, encoded, 1, 1]
        self.awaited = -1
        self.barrier: Barrier | None = None


class Barrier:
    """A point where pieces wait for each other.

    Args:
        members: the number of pieces.
    """

    def __init__(self, members: int) -> None:
        self.missing, self.members = members, list[Task]()


class Scheduler:
    """Resumes the pieces of one exchange.

    Attributes:
        left: the number of unfinished tasks.
        bytes_sent: by this rank.
        wire_s: the times of the first message sent and of the last result received; None without
            messages.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self.left = self.bytes_sent = 0
        self.wire_s: tuple[float, float] | None = None
        self._queues: dict[int, deque[Task]] = {REDUCE: deque(), ENCODE: deque(), DECODE: deque()}
        self._sending = 0  # bytes of encoded messages
        self._expected = [0, 0, 0]  # bytes, by kind of message
        self._expected_later: list[deque[tuple[Task, Array, int]]] = [deque(), deque(), deque()]

    def begin(self, task: Task, steps: Iterator[int]) -> None:
        """Run a piece until its first wait. Turns are given in the order of these calls."""
        task.steps = steps
        self.left += 1
        self._resume(task)

    def work(self) -> bool:
        """Resume the next piece with a turn. Return False if there is none."""
        queues = self._queues
        if queues[REDUCE]:
            task = queues[REDUCE].popleft()
        elif self._may_encode():
            task = queues[ENCODE].popleft()
        elif queues[DECODE]:
            task = queues[DECODE].popleft()
        else:
            return False
        self._resume(task)
        return True

    def count(self, task: Task, event: int) -> None:
        """Count a message of the given kind; resume the piece if this was the last missing one."""
        task.missing[event] -= 1
        if task.missing[event] == 0 and task.awaited == event:
            self._resume(task)

    def arrive(self, task: Task, barrier: Barrier) -> None:
        """Count a piece as arrived at a barrier. The piece then waits for ALL_ARRIVED."""
        barrier.missing -= 1
        barrier.members.append(task)
        task.barrier = barrier

    def send(self, task: Task, message: Array, peer: int, kind: int) -> None:
        """Send a message of a piece. Count SENT once it is sent, except for results."""
        now = runtime.perf_counter()
        self.wire_s = (self.wire_s[0] if self.wire_s else now, now)
        self.bytes_sent += message.nbytes
        then: Then = lambda: None  # noqa: E731  no piece waits for a result's SENT
        if kind == VALUES:
            then = partial(self.count, task, SENT)
        elif kind == ENCODED:
            self._sending += message.nbytes
            then = partial(self._sent, task, message.nbytes)
        self._messages.send(message, peer, tag_of(task.piece, kind), then)

    def expect(self, task: Task, buffer: Array, sender: int, kind: int) -> None:
        """Receive a message of a piece, after the earlier expected messages of the same kind."""
        self._expected_later[kind].append((task, buffer, sender))
        self._receive(kind)

    def receive_result(self, task: Task, buffer: Array, sender: int) -> None:
        """Receive a result from within this host immediately, outside the window."""
        came = partial(self._came, task, REDUCED, 0)
        self._messages.receive(buffer, sender, tag_of(task.piece, REDUCED), came)

    def _receive(self, kind: int) -> None:
        later = self._expected_later[kind]
        while later and self._expected[kind] < WINDOW:
            task, buffer, sender = later.popleft()
            self._expected[kind] += buffer.nbytes
            came = partial(self._came, task, kind, buffer.nbytes)
            self._messages.receive(buffer, sender, tag_of(task.piece, kind), came)

    def _came(self, task: Task, kind: int, nbytes: int) -> None:
        if kind == REDUCED:
            assert self.wire_s is not None
            self.wire_s = (self.wire_s[0], runtime.perf_counter())
        self._expected[kind] -= nbytes
        self.count(task, kind)
        self._receive(kind)

    def _may_encode(self) -> bool:
        """Return True if the first piece in the queue has its host's values and room to send."""
        queue = self._queues[ENCODE]
        return bool(queue) and self._sending < WINDOW and queue[0].missing[VALUES] == 0

    def _sent(self, task: Task, nbytes: int) -> None:
        self._sending -= nbytes
        self.count(task, SENT)

    def _resume(self, task: Task) -> None:
        task.awaited = -1
        for awaited in task.steps:
            if awaited in self._queues:
                self._queues[awaited].append(task)
                return
            if awaited == ALL_ARRIVED:
                assert task.barrier is not None
                if task.barrier.missing == 0:
                    for member in task.barrier.members:
                        self._resume(member)
                return
            if task.missing[awaited]:
                task.awaited = awaited
                return
        self.left -= 1


def tag_of(piece: Piece, kind: int) -> int:
    """Return the message tag for a piece and a kind of message, the same on all ranks."""
    return 3 * piece.tag + kind
