"""Messages from one rank to another: a header of 16 numbers, and for some of them a body.

Collectives make all ranks wait for each other. A parameter server must not: it takes what comes,
from whom it comes, and sleeps when nothing does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from .backoff import Backoff

HEADER_LENGTH = 16

Header = npt.NDArray[np.int64]  #: [16], int64
Bytes = npt.NDArray[np.uint8]
Result = TypeVar("Result")


class Transfer(Protocol):
    """A body on its way. The array that it is sent from, or received into, belongs to it.

    Attributes:
        peer: to or from whom.
    """

    peer: int

    def done(self) -> bool:
        """Whether it has ended; moves it on.

        Raises:
            RanksLost: it never will.
            OtherLength: it has, and what was received is something else.
        """


class OtherLength(Exception):
    """A body has come that is not of the length that its header has announced."""


class Endpoint(ABC):
    """One side of the messages between this rank and its peers.

    The next header of every peer is always being received (MPI: a receive is posted before it is
    sent), and is given once by `arrivals`. The next one after it is received from `listen` on. A
    peer's messages come in their order. Everything here is local.

    Attributes:
        rank: of this side.
        peers: the ranks at the other side.
        timeout_s: longest wait for one of them.
    """

    rank: int
    peers: tuple[int, ...]
    timeout_s: float

    @abstractmethod
    def listen(self, peer: int) -> None:
        """Begin to receive a peer's next header."""

    @abstractmethod
    def arrivals(self) -> list[tuple[int, Header]]:
        """Headers that have come since the last call, with their senders; does not wait.

        Raises:
            RanksLost: a rank has died, where the others survive that.
        """

    @abstractmethod
    def receive(self, peer: int, body: Bytes) -> Transfer:
        """Begin to receive the body that follows a header.

        Args:
            body: uint8, of just the length that was sent, written.
        """

    @abstractmethod
    def next_body_length(self, peer: int) -> int:
        """The length of the next body, which comes just before its header; 0 where there is none,
        or it is not known yet."""

    @abstractmethod
    def discard(self, peer: int) -> None:
        """Throw away the body that has come with a header which does not say its length."""

    @abstractmethod
    def send(self, peer: int, header: Header, body: Bytes | None = None) -> Transfer:
        """Begin to send; neither array may be changed before that has ended. An empty body is
        none."""

    @abstractmethod
    def idle(self, seconds: float) -> None:
        """Leave the core to others for so long, or until something comes."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening: at the end, when nothing more is to come."""

    @abstractmethod
    def finished_peers(self) -> list[int]:
        """Peers whose program has ended, as far as is known: of them comes nothing but what is on
        its way already."""

    def abandon(self) -> None:  # noqa: B027
        """Ranks have died, and the communicator is revoked: wait until nothing that was begun here
        reads or writes an array any more. There are no messages after it."""

    def continues_without(self, peer: int) -> bool:
        """Whether the others go on without a peer that has been silent for `timeout_s`: then it is
        gone, or soon is. Else the job is to end. Local."""
        return False

    def show_stacks(self, peer: int, why: str) -> None:  # noqa: B027
        """A peer lets this rank wait, which is to end the job: say what the peer does, and have all
        ranks write their stacks, where they have logs of their own. Takes a second or two.

        Args:
            why: this rank asks, after "rank 3".
        """

    @abstractmethod
    def watched(self, name: str, peer: int) -> AbstractContextManager[object]:
        """Around a wait for one peer, which is not endless.

        Args:
            name: of what is waited for, or waited in.

        It ends after `timeout_s`, or two seconds after it is known that the peer has left: over MPI
        with the job; between threads by a UserError of `arrivals`.
        """

    def backoff(self, *, moving: bool = False) -> Backoff:
        """Between two questions whether something has come.

        Args:
            moving: bodies are under way, which some MPIs move on only when they are asked: ask more
                often, for some milliseconds without a sleep.
        """
        if moving:
            return Backoff(self.idle, at_once=400, first_s=2e-5, growth=1.1, longest_s=5e-5)
        return Backoff(self.idle, at_once=40, first_s=2e-5, growth=1.1)

    def until(self, ready: Callable[[], Result | None]) -> Result:
        """What `ready` returns, as soon as that is something; meanwhile the core is left to others.

        The first tenth of a millisecond is spent asking, since answers often come at once; then
        this rank sleeps between two questions, longer and longer, to a millisecond at most.
        """
        backoff = self.backoff()
        while (result := ready()) is None:
            backoff.pause()
        return result

    def finish(self, transfers: Iterable[Transfer], name: str = "messages") -> None:
        """Until all have ended; each is a wait of this name. Raises as their `done`."""
        backoff = self.backoff(moving=True)
        for transfer in transfers:
            with self.watched(name, transfer.peer):
                while not transfer.done():
                    backoff.pause()


def as_bytes(array: npt.NDArray[Any]) -> Bytes:
    """The bytes of a contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8)


def send_and_receive_tags(serving: bool) -> tuple[int, int]:
    """What a side sends with and what it listens to: requests and replies never mix, even where a
    worker and a server are threads of one rank. A body's tag is its header's and 1."""
    request, reply = 10, 20
    return (reply, request) if serving else (request, reply)
