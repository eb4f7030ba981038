"""Arrays from one rank to another, many at a time, beside the collectives."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from .backoff import Backoff

Array = Any  #: a NumPy or CuPy array, contiguous and one-dimensional
Then = Callable[[], object]  #: what to do when a message has been sent, or is here

MOST_VALUES = 1 << 30  #: in one message: some MPIs count no further than twice this

PIECE_VALUES = 1 << 18  #: at most, of a piece of a long vector, which travels by itself
PIECE_BYTES = 1 << 18  #: at most, of a piece as it is sent


def piece_values(value_bytes: float) -> int:
    """How many values of so many bytes on the wire make a piece.

    More values make fewer messages; more bytes would make some MPIs agree on each with its receiver
    before they send it (see `launched.EAGER_BYTES`).
    """
    return max(1, int(min(PIECE_VALUES, PIECE_BYTES / value_bytes)))


class Messages(ABC):
    """Sends and receives under way at this rank. Everything here is local.

    A message goes to the oldest receive that its sender and tag fit. `progress` moves all of them
    on (some MPIs do so only when they are asked) and calls `then` of those that have ended.
    """

    @abstractmethod
    def send(self, array: Array, peer: int, tag: int, then: Then) -> None:
        """Begin to send; the array may not be changed until `then` is called."""

    @abstractmethod
    def receive(self, array: Array, peer: int, tag: int, then: Then) -> None:
        """Begin to receive into an array with room for what is sent; its beginning is `then`
        written."""

    @abstractmethod
    def progress(self) -> bool:
        """Move messages on, and call `then` of those that have ended; whether there were any."""

    @property
    @abstractmethod
    def under_way(self) -> int:
        """How many have not ended."""

    def enter(self) -> None:  # noqa: B027
        """All ranks begin something together, in which they wait for each other: a rank that leaves
        before it has entered as often as the others is then missed at once."""

    @abstractmethod
    def watched(self, name: str) -> AbstractContextManager[object]:
        """Around a wait for a message, which is not endless: enter it where the wait begins, and
        leave it when something has come.

        Over MPI the job ends after the communicator's `timeout_s`, or as soon as a rank is known to
        have left before it has come so far by `enter`. Between threads `progress` raises a
        UserError after `timeout_s`, or two seconds after a rank has left of which a message is
        received.
        """

    def idle(self, seconds: float) -> None:
        """Leave the core to others for so long, or until something comes."""
        time.sleep(seconds)

    def backoff(self, *, computing: bool = False) -> Backoff:
        """Between two calls of `progress`.

        Args:
            computing: another thread of this rank does, which is what the wait is for: leave the
                core to it at once, and for longer and longer.
        """
        if computing:
            return Backoff(self.idle, first_s=5e-5, growth=1.5)
        return Backoff(self.idle, at_once=50, first_s=5e-5)


def pieces_of(array: Array, most_values: int) -> list[Array]:
    """An array as it is sent in messages of so many values at most; one of none is one message."""
    if array.size <= most_values:
        return [array]
    return [array[at : at + most_values] for at in range(0, array.size, most_values)]
