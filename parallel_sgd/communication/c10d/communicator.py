"""The communicator of ranks that find each other through PyTorch, for NumPy and CuPy arrays."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt

from ...errors import SharedError, UserError
from ...kernels import array_module
from ..backoff import Backoff
from ..communicator import Closed, Communicator, Counts
from ..cuda.nccl import Nccl, require_gpus
from ..cuda.staging import pinned_like, to_device, to_host
from ..endpoint import Endpoint
from ..liveness.watchdog import Watchdog
from ..messages import Array, Messages, parts_of
from ..phrases import different_calls
from .connections import Listener, Offer
from .endpoint import MeshEndpoint
from .mesh import Mesh
from .messages import AT_ONCE, IDLE_S, MeshMessages, bytes_of
from .peer import COLLECTIVES, Key, mismatch

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
    all ranks gather the parts, so no rank sends much more than twice the array. Arrays of GPUs
    travel by NCCL, or through pinned host memory if a rank has no NCCL, or shares its GPU.
    """

    def __init__(self, mesh: Mesh, watched: Watchdog) -> None:
        self.rank, self.size = mesh.rank, len(mesh.world_ranks)
        self._mesh, self._watched, self.timeout_s = mesh, watched, watched.timeout_s
        self._world_ranks = tuple(mesh.world_ranks)
        self._wait = watched("", awaited=self._awaited)  # reused: collectives never overlap
        self._number = self._call = 0  # collectives so far; the present one's index in CALLS
        self._device: Nccl | None = None  #: for arrays of GPUs
        self._nccl_chosen = False
        mesh.on_early(self._require_same_call)
        #: The other ranks, in the order of sending: all begin with different receivers.
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]

    def allgather(self, send: Array, receive: Array, counts: Counts) -> None:
        parts = parts_of(receive, counts)
        own = parts[self.rank]
        own[...] = send
        with self.trace.collective():
            self._send_receive("allgather", receive, [own] * self.size, parts)

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
            self._send_receive("alltoall", receive, sent, received)

    def broadcast(self, array: Array, root: int = 0) -> None:
        array = array.reshape(-1)
        nothing: list[Array | None] = [None] * self.size
        from_root, is_root = list(nothing), self.rank == root
        with self.trace.collective():
            if array.nbytes <= MOST_DIRECT or self.size == 2:
                from_root[root] = array
                sent, received = ([array] * self.size, nothing) if is_root else (nothing, from_root)
                self._send_receive("broadcast", array, sent, received)
                return
            ends = [array.size * (rank + 1) // self.size for rank in range(self.size)]
            parts = [array[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
            from_root[root] = parts[self.rank]
            sent, received = (parts, nothing) if is_root else (nothing, from_root)
            self._send_receive("broadcast", array, sent, received)
            to_others: list[Array | None] = [parts[self.rank]] * self.size
            to_others[root] = None
            received = nothing if is_root else parts
            self._send_receive("broadcast", array, to_others, received)

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
        if self._device is not None:
            self._device.close()
            self._device = None
        if isinstance(mesh, Mesh):
            mesh.close()

    @property
    def world_ranks(self) -> tuple[int, ...]:
        return self._world_ranks

    @property
    def host(self) -> str:
        return platform.node()

    def _send_receive(
        self,
        call: str,
        like: Array,
        sent: Sequence[Array | None],
        received: Sequence[Array | None],
    ) -> None:
        """Send an array to each other rank, and receive one from each, as part of a collective.

        Args:
            call: its name.
            like: an array of their kind.
            sent, received: by rank; None: no message. Their items for this rank are ignored.
        """
        to = [(peer, sent[peer]) for peer in self._peers if sent[peer] is not None]
        of = [(peer, received[peer]) for peer in self._peers if received[peer] is not None]
        if array_module(like) is np:
            self._exchange(
                call, [(p, bytes_of(a)) for p, a in to], [(p, bytes_of(a)) for p, a in of]
            )
        elif (nccl := self._nccl(like)) is not None:
            nccl.send_receive(to, of)
        else:
            copies = {id(array): bytes_of(to_host(array)) for _, array in to}
            hosts = [pinned_like(array) for _, array in of]
            data = [(peer, copies[id(array)]) for peer, array in to]
            rooms = [(peer, bytes_of(host)) for (peer, _), host in zip(of, hosts, strict=True)]
            self._exchange(call, data, rooms)
            for host, (_, array) in zip(hosts, of, strict=True):
                to_device(host, array)

    def _nccl(self, like: Array) -> Nccl | None:
        """Return NCCL for GPU arrays; None if a rank has no NCCL, or shares its GPU.

        Collective at its first call.
        """
        if not self._nccl_chosen:
            self._nccl_chosen = True
            with contextlib.suppress(SharedError):  # raised on all ranks: through host memory
                require_gpus(like, self)
                self._device = Nccl(self, like.view(np.uint8))
        return self._device

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
        backoff = Backoff(mesh.idle, at_once=AT_ONCE, first_s=IDLE_S)

        def done(peer: int, room: memoryview | None, data: memoryview) -> None:
            nonlocal left
            if room is not None and room.nbytes != data.nbytes:
                raise mismatch(self._world_ranks[peer], data.nbytes, room.nbytes)
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
            for peer, early in mesh.unreceived(COLLECTIVES):
                self._require_same_call(peer, early)
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
