"""Which piece of an exchange goes on next, and how much is on the wire meanwhile.

What others wait for comes first: owners reduce, then local leaders encode, then every rank decodes,
which is for itself alone.

A link that many send to at once loses packets, and takes longer. So a rank encodes for one owner
after the other, beginning with the one after it, as in a ring, and owners receive in just that
order. And between hosts a rank sends only so much of what it has encoded, and receives only so much
of each kind of message, at a time as keeps a link busy (`WINDOW`).

No rank waits for itself:

- Pieces are encoded in the order in which they began, whatever comes first. So of all encoded
  messages that are missing the first, by that order, can always be sent and received.
- No result holds up an encoded message, nor a result of another host. Results have no window where
  they are sent. Within a host they have none where they are received, either: the rank that passes
  them on may itself be waiting for its turn of a window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from time import perf_counter
from typing import Any

from ..communication.messages import Messages, Then
from .layout import Piece

Array = Any  #: a NumPy or CuPy array

VALUES, ENCODED, REDUCED = range(3)  #: kinds of messages; as waits: all of the piece's are here
SENT = 3  #: to wait for: this rank's own message of the piece, whose place is free then
ENCODE, REDUCE, DECODE = range(4, 7)  #: to wait for: the turn to do so
ALL_ARRIVED = 7  #: to wait for: that all pieces have come to a `Barrier`

WINDOW = 2 << 20
"""Bytes of a kind that are sent, or expected, at a time: what a link holds, and some more."""


class Task:
    """A piece under way.

    Args:
        values, encoded: how many messages there are of each, this rank's own included.

    Attributes:
        steps: a generator that does what is to be done, and yields what it waits for.
        missing: by VALUES, ENCODED, REDUCED and SENT, how many.
    """

    __slots__ = ("awaited", "barrier", "missing", "piece", "steps")

    steps: Iterator[int]

    def __init__(self, piece: Piece, values: int, encoded: int) -> None:
        self.piece, self.missing = piece, [values, encoded, 1, 1]
        self.awaited = -1
        self.barrier: Barrier | None = None  # to which it has come last


class Barrier:
    """Where pieces wait for each other.

    Args:
        members: how many pieces.
    """

    def __init__(self, members: int) -> None:
        self.missing, self.members = members, list[Task]()


class Scheduler:
    """Resumes the pieces of one exchange.

    Attributes:
        left: tasks that have not come to their end.
        bytes_sent: by this rank to others.
        wire_s: when the first message was sent and the last result was here; None: no messages.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self.left = self.bytes_sent = 0
        self.wire_s: tuple[float, float] | None = None
        self._queues: dict[int, deque[Task]] = {REDUCE: deque(), ENCODE: deque(), DECODE: deque()}
        self._sending = 0  # bytes that are encoded
        self._expected = [0, 0, 0]  # bytes by kind
        self._expected_later: list[deque[tuple[Task, Array, int]]] = [deque(), deque(), deque()]

    def begin(self, task: Task, steps: Iterator[int]) -> None:
        """Go on with a piece until it waits. Those that wait for their turn do so in this order."""
        task.steps = steps
        self.left += 1
        self._resume(task)

    def work(self) -> bool:
        """Do what is next; whether there was anything."""
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
        """One of what a piece waits for, or will, has happened."""
        task.missing[event] -= 1
        if task.missing[event] == 0 and task.awaited == event:
            self._resume(task)

    def arrive(self, task: Task, barrier: Barrier) -> None:
        """A piece has come to a meeting, and now waits for MET."""
        barrier.missing -= 1
        barrier.members.append(task)
        task.barrier = barrier

    def send(self, task: Task, message: Array, peer: int, kind: int) -> None:
        """Send a message of a piece; SENT happens when that has been done."""
        now = perf_counter()
        self.wire_s = (self.wire_s[0] if self.wire_s else now, now)
        self.bytes_sent += message.nbytes
        then: Then = lambda: None  # noqa: E731  nobody waits for that of a result
        if kind == VALUES:
            then = partial(self.count, task, SENT)
        elif kind == ENCODED:
            self._sending += message.nbytes
            then = partial(self._sent, task, message.nbytes)
        self._messages.send(message, peer, tag_of(task.piece, kind), then)

    def expect(self, task: Task, buffer: Array, sender: int, kind: int) -> None:
        """Receive a message of a piece, after those of its kind that were expected before."""
        self._expected_later[kind].append((task, buffer, sender))
        self._receive(kind)

    def receive_result(self, task: Task, buffer: Array, sender: int) -> None:
        """Receive a result from within this host, at once."""
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
            self.wire_s = (self.wire_s[0], perf_counter())
        self._expected[kind] -= nbytes
        self.count(task, kind)
        self._receive(kind)

    def _may_encode(self) -> bool:
        """Whether the first in line has the values of its host, and may send."""
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
    """Of a message, the same on all ranks."""
    return 3 * piece.tag + kind
