"""The communicator of ranks that find each other through PyTorch, for NumPy arrays."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from typing import cast

import numpy as np
import numpy.typing as npt

from ...errors import UserError
from ..communicator import Closed, Communicator, Counts
from ..endpoint import Endpoint
from ..liveness.watchdog import Watchdog
from ..messages import Array, Messages
from ..phrases import different_calls
from .connections import Listener, Offer
from .messages import TcpMessages

CALLS = ("allgather", "alltoall", "broadcast", "sum_integers", "allgather_object")
"""The collectives; a message has its collective's number and its index here as a tag."""

MOST_DIRECT = 1 << 15  #: most bytes broadcast by messages from the root to every rank

Data = tuple[int, memoryview]  #: a rank, and bytes for it or from it


class C10dCommunicator(Communicator):
    """Ranks connected by TCP, every two of them. Local.

    Args:
        rank: this rank.
        messages: of the collectives; not for any other use.
        watched: bounds every wait.
        world_ranks: the world rank of every rank.

    Every collective sends directly from rank to rank. All but `broadcast` then send the fewest
    bytes possible. A large array is broadcast in parts: the root sends each rank another part, and
    all ranks gather the parts, so no rank sends much more than twice the array.
    """

    def __init__(
        self, rank: int, messages: TcpMessages, watched: Watchdog, world_ranks: tuple[int, ...]
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, len(world_ranks), watched.timeout_s
        self._collectives, self._watched, self._world_ranks = messages, watched, world_ranks
        self._messages: TcpMessages | None = None  #: of `messages`, from its first call on
        self._wait = watched("", awaited=messages.awaited)  # reused: collectives never overlap
        self._number = self._call = 0  # collectives so far; the present one's index in CALLS
        messages.on_early = self._require_same_call
        #: The other ranks, in the order of sending: all begin with different receivers.
        self._peers = [(rank + step) % self.size for step in range(1, self.size)]

    def allgather(self, send: Array, receive: Array, counts: Counts) -> None:
        parts = _parts(receive, counts)
        parts[self.rank][...] = send
        with self.trace.collective():
            own = _bytes(parts[self.rank])
            self._exchange(
                "allgather",
                [(peer, own) for peer in self._peers],
                [(peer, _bytes(parts[peer])) for peer in self._peers],
            )

    def alltoall(
        self,
        send: Array,
        send_counts: Counts,
        receive: Array,
        receive_counts: Counts,
        *,
        most: int | None = None,
    ) -> None:
        sent, received = _parts(send, send_counts), _parts(receive, receive_counts)
        received[self.rank][...] = sent[self.rank]
        with self.trace.collective():
            self._exchange(
                "alltoall",
                [(peer, _bytes(sent[peer])) for peer in self._peers],
                [(peer, _bytes(received[peer])) for peer in self._peers],
            )

    def broadcast(self, array: Array, root: int = 0) -> None:
        data, is_root = _bytes(array), self.rank == root
        with self.trace.collective():
            if data.nbytes <= MOST_DIRECT or self.size == 2:
                self._exchange(
                    "broadcast",
                    [(peer, data) for peer in self._peers if is_root],
                    [] if is_root else [(root, data)],
                )
                return
            ends = [data.nbytes * (rank + 1) // self.size for rank in range(self.size)]
            parts = [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
            self._exchange(
                "broadcast",
                [(peer, parts[peer]) for peer in self._peers if is_root],
                [] if is_root else [(root, parts[self.rank])],
            )
            others = [peer for peer in self._peers if peer != root]
            self._exchange(
                "broadcast",
                [(peer, parts[self.rank]) for peer in others],
                [] if is_root else [(peer, parts[peer]) for peer in self._peers],
            )

    def sum_integers(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        gathered = np.empty((self.size, values.size), np.int64)
        gathered[self.rank] = values
        own = _bytes(gathered[self.rank])
        self._exchange(
            "sum_integers",
            [(peer, own) for peer in self._peers],
            [(peer, _bytes(gathered[peer])) for peer in self._peers],
        )
        total: npt.NDArray[np.int64] = gathered.sum(axis=0)
        return total

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        gathered = {self.rank: data}

        def received(peer: int, item: memoryview) -> None:
            gathered[peer] = item.tobytes()

        own = memoryview(data)
        self._exchange("allgather_object", [(peer, own) for peer in self._peers], [], received)
        return [gathered[rank] for rank in range(self.size)]

    def duplicate(self) -> Communicator:
        return self.split(0)

    def split(self, group: int) -> Communicator:
        with self.together(Listener) as listener:
            gathered = self._gather("Communicator.split()", [group, [*listener.offer]])
            members = [rank for rank, (theirs, _) in enumerate(gathered) if theirs == group]
            offers = [Offer.of(gathered[member][1]) for member in members]
            messages = self._connected(listener, members, offers)
        world_ranks = tuple(self._world_ranks[member] for member in members)
        made = C10dCommunicator(members.index(self.rank), messages, self._watched, world_ranks)
        made.trace = self.trace
        return made

    def messages(self) -> Messages:
        if self._messages is None:
            with self.together(Listener) as listener:
                gathered = self._gather("Communicator.messages()", [*listener.offer])
                members, offers = range(self.size), [Offer.of(values) for values in gathered]
                self._messages = self._connected(listener, members, offers)
        return self._messages

    def endpoint(self, peers: Sequence[int], *, serving: bool) -> Endpoint:
        raise UserError(
            "parameter servers need ranks of MPI: start them by `parallel-sgd run` or mpiexec"
        )

    def close(self) -> None:
        for messages in (self._collectives, self._messages):
            if isinstance(messages, TcpMessages):
                messages.close()
        self._collectives = cast(TcpMessages, Closed())
        self._messages = None

    @property
    def world_ranks(self) -> tuple[int, ...]:
        return self._world_ranks

    @property
    def host(self) -> str:
        return platform.node()

    def _exchange(
        self,
        call: str,
        sent: Iterable[Data],
        received: Iterable[Data],
        then: Callable[[int, memoryview], object] | None = None,
    ) -> None:
        """Send bytes to ranks, and receive bytes from ranks, as part of a collective.

        Args:
            call: its name.
            sent: the ranks and their bytes.
            received: the ranks, and room for exactly their bytes.
            then: called with each other rank and its bytes, of any length, in place of `received`.
        """
        messages = self._collectives
        self._number, self._call = self._number + 1, CALLS.index(call)
        tag = self._number * len(CALLS) + self._call
        backoff = messages.backoff()
        with self._waits(call):
            for peer, data in received:
                messages.receive_bytes(data, peer, tag)
            if then is not None:
                for peer in self._peers:
                    messages.receive_any(peer, tag, partial(then, peer))
            for peer, data in sent:
                messages.send_bytes(data, peer, tag)
            while messages.under_way:
                if messages.progress():
                    backoff.reset()
                else:
                    backoff.pause()

    def _waits(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager to bound the wait of a collective."""
        wait = self._wait
        self._collectives.name = wait.name = name
        wait.problem = self._problem
        return wait

    def _require_same_call(self, peer: int, tag: int) -> None:
        """Raise an error for a message of a different collective with the present number."""
        number, call = divmod(tag, len(CALLS))
        if number == self._number and call != self._call:
            ranks = (self._world_ranks[self.rank], self._world_ranks[peer])
            different = different_calls([CALLS[self._call], CALLS[call]], ranks)
            raise UserError(cast(str, different))

    def _connected(
        self, listener: Listener, members: Sequence[int], offers: Sequence[Offer]
    ) -> TcpMessages:
        """Connect some of these ranks. Collective over all ranks."""
        place = members.index(self.rank)
        connections = self.together(lambda: listener.connect(place, offers, self.timeout_s))
        ranks = [self._world_ranks[member] for member in members]
        return TcpMessages(connections, self._watched, ranks)


def _parts(array: Array, counts: Counts) -> list[Array]:
    """Cut an array into consecutive parts of these sizes."""
    ends = list(accumulate(counts))
    return [array[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _bytes(array: Array) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))
