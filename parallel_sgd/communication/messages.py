"""Array messages between two ranks, many at a time, independent of the collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

from .. import runtime
from .backoff import Backoff

Array = Any  #: a NumPy or CuPy array, contiguous and one-dimensional
Then = Callable[[], object]  #: called when a message has been sent or received

MOST_VALUES = 1 << 30  #: most values of a message: some MPIs count only to 2^31

PIECE_VALUES = 1 << 18  #: most values of a piece of a long vector; each piece is one message
PIECE_BYTES = 1 << 18  #: most bytes of an encoded piece


def piece_values(value_bytes: float) -> int:
    """Return the number of values per piece for a given number of bytes per value.

    Larger pieces make fewer messages. But some MPIs negotiate large messages with the receiver
    before sending (see `job_environment.EAGER_BYTES`).
    """
    return max(1, int(min(PIECE_VALUES, PIECE_BYTES / value_bytes)))


class Messages(ABC):
    """Pending sends and receives of this rank. All methods are local.

    A message is matched to the oldest receive with its sender and tag. `progress` drives all
    messages (some MPIs need polling) and calls `then` for completed messages.
    """

    @abstractmethod
    def send(self, array: Array, peer: int, tag: int, then: Then) -> None:
        """Begin to send. The array may not change until `then` is called."""

    @abstractmethod
    def receive(self, array: Array, peer: int, tag: int, then: Then) -> None:
        """Begin to receive into an array of at least the sent length.

        The received values fill the beginning of the array once `then` is called.
        """

    @abstractmethod
    def progress(self) -> bool:
        """Drive all messages and call `then` for completed ones. Return True if any completed."""

    @property
    @abstractmethod
    def under_way(self) -> int:
        """Number of pending messages."""

    def enter(self) -> None:  # noqa: B027
        """Count the start of an operation in which all ranks wait for each other.

        If a rank finishes with a lower count than the other ranks, their waits end at once.
        """

    @abstractmethod
    def watched(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager to bound a wait for a message.

        Enter the context when the wait begins, leave it when a message has arrived. Over MPI the
        job ends after `timeout_s`, or as soon as a rank is known to have finished with a lower
        count of `enter`. Between threads `progress` raises a UserError after `timeout_s`, or two
        seconds after the sender of an awaited message has finished.
        """

    def idle(self, seconds: float) -> None:
        """Yield the core for `seconds`, or until a message arrives."""
        runtime.sleep(seconds)

    def backoff(self, *, computing: bool = False) -> Backoff:
        """Return the pauses between two calls of `progress`.

        Args:
            computing: another thread of this rank computes the awaited result. Yield the core to
                that thread at once, with increasing pauses.
        """
        if computing:
            return Backoff(self.idle, first_s=5e-5, growth=1.5)
        return Backoff(self.idle, at_once=50, first_s=5e-5)


def pieces_of(array: Array, most_values: int) -> list[Array]:
    """Cut an array into pieces of at most `most_values` values. An empty array is one piece."""
    if array.size <= most_values:
        return [array]
    return [array[at : at + most_values] for at in range(0, array.size, most_values)]


def parts_of(array: Array, counts: Sequence[int]) -> list[Array]:
    """Cut an array into consecutive parts of these sizes."""
    ends = list(accumulate(counts))
    return [array[end - count : end] for end, count in zip(ends, counts, strict=True)]
