"""Some of a communicator's ranks, which communicate without the remaining ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from .backoff import Backoff
from .communicator import Communicator, Counts
from .endpoint import Endpoint
from .messages import Array, Messages, Then, parts_of

TAG = 0  #: of the collectives: messages of a sender with the same tag arrive in order


class Subset(Communicator):
    """Some ranks of a communicator. Creation is local and free, unlike `Communicator.split`.

    The ranks of a subset each create the subset, with the same members. Collectives consist of
    messages from rank to rank. A broadcast of n values sends n values to each rank; other
    collectives send the fewest bytes possible.

    Args:
        comm: a communicator used by subsets alone. No rank may be in two subsets at a time.
        members: ranks of `comm` in the same order on all, with this rank.
    """

    def __init__(self, comm: Communicator, members: Sequence[int]) -> None:
        self.members = tuple(members)
        self.rank, self.size = self.members.index(comm.rank), len(self.members)
        self.timeout_s, self.trace = comm.timeout_s, comm.trace
        self._comm = comm
        self._messages = comm.messages()

    def allgather(self, send: Array, receive: Array, counts: Counts) -> None:
        parts = parts_of(receive, counts)
        own = parts[self.rank]
        own[...] = send
        with self.trace.collective():
            self._exchange("allgather", [own] * self.size, parts)

    def alltoall(
        self,
        send: Array,
        send_counts: Counts,
        receive: Array,
        receive_counts: Counts,
        *,
        most: int | None = None,
    ) -> None:
        sent, received = parts_of(send, send_counts), parts_of(receive, receive_counts)
        received[self.rank][...] = sent[self.rank]
        with self.trace.collective():
            self._exchange("alltoall", sent, received)

    def broadcast(self, array: Array, root: int = 0) -> None:
        array, nothing = array.reshape(-1), array[:0].reshape(-1)
        empty, whole = [nothing] * self.size, [array] * self.size
        from_root = [array if rank == root else nothing for rank in range(self.size)]
        with self.trace.collective():
            if self.rank == root:
                self._exchange("broadcast", whole, empty)
            else:
                self._exchange("broadcast", empty, from_root)

    def sum_integers(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        gathered = np.empty((self.size, values.size), np.int64)
        gathered[self.rank] = values
        self._exchange("sum_integers", [gathered[self.rank]] * self.size, [*gathered])
        total: npt.NDArray[np.int64] = gathered.sum(axis=0)
        return total

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        counts = np.full(self.size, len(data), np.int64)
        self._exchange("allgather_object", [counts[self.rank :][:1]] * self.size, _each(counts))
        gathered = [np.empty(count, np.uint8) for count in counts.tolist()]
        gathered[self.rank] = np.frombuffer(data, np.uint8).copy()
        self._exchange("allgather_object", [gathered[self.rank]] * self.size, gathered)
        return [part.tobytes() for part in gathered]

    def messages(self) -> Messages:
        return SubsetMessages(self._comm.messages(), self.members)

    @property
    def world_ranks(self) -> Sequence[int]:
        return [self._comm.world_ranks[member] for member in self.members]

    @property
    def host(self) -> str:
        return self._comm.host

    def duplicate(self) -> NoReturn:
        self._refuse("duplicate")

    def split(self, group: int) -> NoReturn:
        self._refuse("split")

    def endpoint(self, peers: Sequence[int], *, serving: bool) -> Endpoint:
        self._refuse("endpoint")

    def _refuse(self, call: str) -> NoReturn:
        raise UserError(f"a subset of ranks has no {call}(): make it of the whole communicator")

    def _exchange(self, call: str, sent: Sequence[Array], received: Sequence[Array]) -> None:
        """Send an array to each other rank, and receive one from each. Empty ones do not travel.

        Args:
            call: name of the collective.
            sent, received: by rank; their items for this rank are ignored.
        """
        messages = self._messages

        def ended() -> None:
            pass

        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            if received[source].size:
                messages.receive(received[source], self.members[source], TAG, ended)
            if sent[to].size:
                messages.send(sent[to], self.members[to], TAG, ended)
        backoff = messages.backoff()
        # bounded: each wait for a message is
        while messages.under_way:
            backoff.reset()
            with messages.watched(call):
                while not messages.progress():
                    backoff.pause()


class SubsetMessages(Messages):
    """A channel of all ranks, with the numbers of the subset's ranks."""

    def __init__(self, messages: Messages, members: Sequence[int]) -> None:
        self._messages, self._members = messages, members

    def send(self, array: Array, peer: int, tag: int, then: Then) -> None:
        self._messages.send(array, self._members[peer], tag, then)

    def receive(self, array: Array, peer: int, tag: int, then: Then) -> None:
        self._messages.receive(array, self._members[peer], tag, then)

    def progress(self) -> bool:
        return self._messages.progress()

    @property
    def under_way(self) -> int:
        return self._messages.under_way

    def watched(self, name: str) -> AbstractContextManager[object]:
        return self._messages.watched(name)

    def idle(self, seconds: float) -> None:
        self._messages.idle(seconds)

    def backoff(self, *, computing: bool = False) -> Backoff:
        return self._messages.backoff(computing=computing)


def _each(values: Array) -> list[Array]:
    return [values[at : at + 1] for at in range(len(values))]
