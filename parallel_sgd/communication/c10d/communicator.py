"""The communicator of ranks that find each other through PyTorch, for NumPy arrays."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from typing import cast

import numpy as np
import numpy.typing as npt

from ...errors import UserError
from ..backoff import Backoff
from ..communicator import Closed, Communicator, Counts
from ..endpoint import Endpoint
from ..liveness.watchdog import Watchdog
from ..messages import Array, Messages
from ..phrases import different_calls
from .connections import Listener, Offer
from .endpoint import MeshEndpoint
from .mesh import COLLECTIVES, Key, Mesh
from .messages import MeshMessages, bytes_of

CALLS = ("allgather", "alltoall", "broadcast", "sum_integers", "allgather_object")
"""The collectives; a message has its collective's number and its index here as a tag."""

MOST_DIRECT = 1 << 15  #: most bytes broadcast by messages from the root to every rank


class C10dCommunicator(Communicator):
    """Ranks connected by TCP, every two of them. Local.

    Args:
        mesh: connections of the ranks, for exclusive use.
        watched: bounds every wait.

    Every collective sends directly from rank to rank. All but `broadcast` then send the fewest
    bytes possible. A large array is broadcast in parts: the root sends each rank another part, and
    all ranks gather the parts, so no rank sends much more than twice the array.
    """

    def __init__(self, mesh: Mesh, watched: Watchdog) -> None:
        self.rank, self.size = mesh.rank, len(mesh.world_ranks)
        self._mesh, self._watched, self.timeout_s = mesh, watched, watched.timeout_s
        self._world_ranks = tuple(mesh.world_ranks)
        self._wait = watched("", awaited=self._awaited)  # reused: collectives never overlap
        self._number = self._call = 0  # collectives so far; the present one's index in CALLS
        mesh.on_early = self._require_same_call
        #: The other ranks, in the order of sending: all begin with different receivers.
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]

    def allgather(self, send: Array, receive: Array, counts: Counts) -> None:
        parts = _parts(receive, counts)
        parts[self.rank][...] = send
        with self.trace.collective():
            own = bytes_of(parts[self.rank])
            self._exchange(
                "allgather",
                [(peer, own) for peer in self._peers],
                [(peer, bytes_of(parts[peer])) for peer in self._peers],
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
                [(peer, bytes_of(sent[peer])) for peer in self._peers],
                [(peer, bytes_of(received[peer])) for peer in self._peers],
            )

    def broadcast(self, array: Array, root: int = 0) -> None:
        data, is_root = bytes_of(array), self.rank == root
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
        own = bytes_of(gathered[self.rank])
        self._exchange(
            "sum_integers",
            [(peer, own) for peer in self._peers],
            [(peer, bytes_of(gathered[peer])) for peer in self._peers],
        )
        total: npt.NDArray[np.int64] = gathered.sum(axis=0)
        return total

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        gathered = {self.rank: data}

        def received(peer: int, item: memoryview) -> None:
            gathered[peer] = item.tobytes()

        own = memoryview(data)
        self._exchange(
            "allgather_object",
            [(peer, own) for peer in self._peers],
            [(peer, None) for peer in self._peers],
            received,
        )
        return [gathered[rank] for rank in range(self.size)]

    def duplicate(self) -> Communicator:
        return self.split(0)

    def split(self, group: int) -> Communicator:
        with self.together(Listener) as listener:
            gathered = self._gather("Communicator.split()", [group, [*listener.offer]])
            members = [rank for rank, (theirs, _) in enumerate(gathered) if theirs == group]
            offers = [Offer.of(gathered[member][1]) for member in members]
            place = members.index(self.rank)
            connections = self.together(lambda: listener.connect(place, offers, self.timeout_s))
        mesh = Mesh(place, connections, [self._world_ranks[member] for member in members])
        made = C10dCommunicator(mesh, self._watched)
        made.trace = self.trace
        return made

    def messages(self) -> Messages:
        return MeshMessages(self._mesh, self._watched)

    def endpoint(self, peers: Sequence[int], *, serving: bool) -> Endpoint:
        return MeshEndpoint(self._mesh, peers, serving, self._watched)

    def close(self) -> None:
        mesh, self._mesh = self._mesh, cast(Mesh, Closed())
        if isinstance(mesh, Mesh):
            mesh.close()

    @property
    def world_ranks(self) -> tuple[int, ...]:
        return self._world_ranks

    @property
    def host(self) -> str:
        return platform.node()

    def _exchange(
        self,
        call: str,
        sent: Sequence[tuple[int, memoryview]],
        received: Sequence[tuple[int, memoryview | None]],
        then: Callable[[int, memoryview], object] = lambda peer, data: None,
    ) -> None:
        """Send bytes to ranks, and receive bytes from ranks, as part of a collective.

        Args:
            call: its name.
            sent: the ranks and their bytes.
            received: the ranks, and room for exactly their bytes; None: any number of bytes.
            then: called with a rank and its bytes.
        """
        mesh, left = self._mesh, len(sent) + len(received)
        self._number, self._call = self._number + 1, CALLS.index(call)
        key = COLLECTIVES, self._number * len(CALLS) + self._call
        backoff = Backoff(mesh.idle, at_once=50, first_s=1e-3)

        def done(peer: int, room: memoryview | None, data: memoryview) -> None:
            nonlocal left
            if room is not None and room.nbytes != data.nbytes:
                raise mesh.mismatch(peer, data.nbytes, room.nbytes)
            then(peer, data)
            left -= 1

        def gone() -> None:
            nonlocal left
            left -= 1

        with self._waits(call):
            for peer, room in received:
                mesh.receive(room, peer, key, partial(done, peer, room))
            for peer, data in sent:
                mesh.send(data, peer, key, gone)
            before = left
            while left:
                mesh.drive()
                if left < before:
                    before = left
                    backoff.reset()
                else:
                    mesh.require_connected(COLLECTIVES, call)
                    backoff.pause()

    def _waits(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager to bound the wait of a collective."""
        wait = self._wait
        wait.name, wait.problem = name, self._problem
        return wait

    def _awaited(self) -> list[int]:
        return [self._world_ranks[peer] for peer in self._mesh.awaited(COLLECTIVES)]

    def _require_same_call(self, peer: int, key: Key) -> None:
        """Raise an error for a message of a different collective with the present number."""
        channel, (number, call) = key[0], divmod(key[1], len(CALLS))
        if channel == COLLECTIVES and number == self._number and call != self._call:
            ranks = (self._world_ranks[self.rank], self._world_ranks[peer])
            different = different_calls([CALLS[self._call], CALLS[call]], ranks)
            raise UserError(cast(str, different))


def _parts(array: Array, counts: Counts) -> list[Array]:
    """Cut an array into consecutive parts of these sizes."""
    ends = list(accumulate(counts))
    return [array[end - count : end] for end, count in zip(ends, counts, strict=True)]
