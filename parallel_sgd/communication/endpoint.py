"""Requests and replies between two ranks: a header of 16 integers, optionally with a body.

Collectives make all ranks wait for each other. A parameter server must not wait: it handles
requests in the order of arrival, from any rank, and sleeps if there are none.
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
    """A message body in flight. The transfer owns its array until done.

    Attributes:
        peer: the remote rank.
    """

    peer: int

    def done(self) -> bool:
        """Return True once the transfer is complete; also drives its progress.

        Raises:
            RanksLost: the peer has failed.
            OtherLength: the received body differs in length from the array.
        """


class OtherLength(Exception):
    """The received body differs in length from the announcement in its header."""


class Endpoint(ABC):
    """One side of the messages between this rank and its peers.

    A receive for the next header of every peer is always posted (MPI: before the header is sent).
    `arrivals` returns each header once; `listen` then posts the next receive. Messages of a peer
    arrive in order. All methods are local.

    Attributes:
        rank: this rank.
        peers: the ranks at the remote side.
        timeout_s: longest wait for a peer, in seconds.
    """

    rank: int
    peers: tuple[int, ...]
    timeout_s: float

    @abstractmethod
    def listen(self, peer: int) -> None:
        """Post the receive for a peer's next header."""

    @abstractmethod
    def arrivals(self) -> list[tuple[int, Header]]:
        """Return headers received since the last call, with their senders, without waiting.

        Raises:
            RanksLost: a rank has failed, and the job is fault-tolerant.
        """

    @abstractmethod
    def receive(self, peer: int, body: Bytes) -> Transfer:
        """Begin to receive the body after a header.

        Args:
            body: uint8 array of exactly the sent length, written.
        """

    @abstractmethod
    def next_body_length(self, peer: int) -> int:
        """Return the bytes of the next body, or 0 if there is none or the length is unknown.

        A body arrives just before its header.
        """

    @abstractmethod
    def discard(self, peer: int) -> None:
        """Discard the body of a header without a valid length."""

    @abstractmethod
    def send(self, peer: int, header: Header, body: Bytes | None = None) -> Transfer:
        """Begin to send a header and its body.

        Neither array may change before the transfer is done.

        Args:
            body: uint8; None or empty sends the header alone.
        """

    @abstractmethod
    def idle(self, seconds: float) -> None:
        """Yield the core for `seconds`, or until a message arrives."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening, once no more messages are expected."""

    @abstractmethod
    def finished_peers(self) -> list[int]:
        """Return peers with finished programs, as far as known.

        Only messages already in flight can still arrive from these peers.
        """

    def abandon(self) -> None:  # noqa: B027
        """Wait until no pending operation reads or writes an array, after `revoke`.

        For endpoints of a failed communicator. No messages are possible afterwards.
        """

    def continues_without(self, peer: int) -> bool:
        """Return True if training continues without a peer silent for `timeout_s`. Local.

        True means the peer has exited or is being evicted. False means the job must end.
        """
        return False

    def show_stacks(self, peer: int, why: str) -> None:  # noqa: B027
        """Report the state of a peer after a timeout.

        All ranks with their own logs write their stacks.

        Args:
            why: the reason, as the text after "rank 3".

        Cost: a second or two.
        """

    @abstractmethod
    def watched(self, name: str, peer: int) -> AbstractContextManager[object]:
        """Return a context manager to bound a wait for one peer.

        Args:
            name: name of the awaited message, for error texts.

        The wait ends after `timeout_s`, or two seconds after the peer is known to have finished.
        Over MPI the job ends; between threads `arrivals` raises a UserError.
        """

    def backoff(self, *, moving: bool = False) -> Backoff:
        """Return the pauses between two checks for messages.

        Args:
            moving: bodies are in flight. Some MPIs make progress only when polled, so poll more
                often, for some milliseconds without sleeping.
        """
        if moving:
            return Backoff(self.idle, at_once=400, first_s=2e-5, growth=1.1, longest_s=5e-5)
        return Backoff(self.idle, at_once=40, first_s=2e-5, growth=1.1)

    def until(self, ready: Callable[[], Result | None]) -> Result:
        """Call `ready` until its result is not None, and return the result.

        The first tenth of a millisecond is spent polling, since replies are often immediate. Then
        this rank sleeps between two calls, longer each time, up to a millisecond.
        """
        backoff = self.backoff()
        # bounded: Conversation calls it in watched()
        while (result := ready()) is None:
            backoff.pause()
        return result

    def finish(self, transfers: Iterable[Transfer], name: str = "messages") -> None:
        """Wait until all transfers are done.

        Args:
            name: name of the wait, for error texts.
        Raises:
            RanksLost, OtherLength: as `Transfer.done`.
        """
        backoff = self.backoff(moving=True)
        for transfer in transfers:
            with self.watched(name, transfer.peer):
                while not transfer.done():
                    backoff.pause()


def as_bytes(array: npt.NDArray[Any]) -> Bytes:
    """Return a view of a contiguous array as bytes [n], uint8, without a copy."""
    return array.reshape(-1).view(np.uint8)


def send_and_receive_tags(serving: bool) -> tuple[int, int]:
    """Return the tags for sending and receiving headers. The tag of a body is one higher.

    Requests and replies have different tags, so a worker and a server can be threads of one rank.
    """
    request, reply = 10, 20
    return (reply, request) if serving else (request, reply)
