"""The communicator over MPI, for NumPy and CuPy arrays."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, TypeVar, cast
from weakref import WeakSet

import mpi4py
import numpy as np
import numpy.typing as npt

from ...kernels import array_module
from ..communicator import Closed, Communicator, Counts
from ..cuda.staging import pinned_like, to_device, to_host
from ..endpoint import Endpoint
from ..job_environment import (
    fault_tolerant,
    launched_rank,
    launched_size,
    launcher_name,
    launcher_supports,
    raise_eager_limit,
)
from ..liveness.abort import install_excepthook
from ..liveness.finish import CollectiveCounter, finalize_at_exit, finish_protocol
from ..liveness.heartbeat import own as own_heartbeat
from ..liveness.rank_process import claim_world
from ..liveness.watchdog import Watchdog, query_status
from ..messages import MOST_VALUES, Array, Messages, parts_of, pieces_of
from ..world_size import require_whole
from .init_timeout import kill_if_longer_than

PIECES = 1  #: tag of messages in place of a large collective; no other message is pending then

mpi4py.rc.initialize = False  # `mpi_world` first checks if launcher and library match
mpi4py.rc.finalize = False  # a forked child would also finalize: see `finalize_at_exit`
from mpi4py import MPI  # noqa: E402

_worlds = itertools.count()  #: worlds made so far, the same number on every rank


def mpi_world(*, timeout_s: float, cuda_aware: bool) -> MpiCommunicator:
    """Return all ranks of MPI.COMM_WORLD: see `Communicator.world`."""
    watched, world = begin(timeout_s, Watchdog), MPI.COMM_WORLD
    # A fault-tolerant rank cannot wait for all ranks to finish.
    reports_finish = (
        world.size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE and not fault_tolerant()
    )
    with watched("Communicator.world()"):
        comm = world.Dup()
        watched.finish_protocol = finish_protocol(world) if reports_finish else None
        own_heartbeat.meet(comm.rank, comm.size, comm.Bcast, comm.Barrier, timeout_s)
    if watched.finish_protocol is not None:
        query_status(watched.finish_protocol, world, timeout_s)
    counter = CollectiveCounter(str(next(_worlds)), tuple(range(world.size)))
    return MpiCommunicator(comm, watched, counter, cuda_aware=cuda_aware)


WatchdogT = TypeVar("WatchdogT", bound=Watchdog)


def begin(timeout_s: float, kind: type[WatchdogT]) -> WatchdogT:
    """Initialize MPI if needed, check its ranks against the launcher, and return the watchdog."""
    claim_world()
    install_excepthook()
    vendor, launcher = MPI.get_vendor()[0], launcher_name()
    matches = (launched_size() or 1) == 1 or launcher is None or launcher_supports(launcher, vendor)
    if matches and not MPI.Is_initialized():
        raise_eager_limit()
        limit = kill_if_longer_than(timeout_s, launched_rank() or 0, "Communicator.world()")
        with limit if launcher is not None else contextlib.nullcontext():
            # bounded: in kill_if_longer_than, if it is launched
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        finalize_at_exit()
    require_whole(MPI.COMM_WORLD.size if matches else 1, vendor)
    return kind(timeout_s, MPI.COMM_WORLD.rank, _end_job_from_another_thread)


class MpiCommunicator(Communicator):
    """Ranks of an MPI communicator. Local.

    Args:
        comm: an mpi4py intracommunicator for exclusive use, so that messages cannot mix.
        watched: bounds every wait in a collective.
        counter: counts the collectives.
        cuda_aware: pass CuPy arrays to MPI directly; otherwise stage arrays through pinned host
            memory.

    Attributes:
        most_values: most values in an MPI call; some MPIs count only to 2^31.
    """

    most_values: ClassVar[int] = MOST_VALUES

    def __init__(
        self,
        comm: MPI.Intracomm,
        watched: Watchdog,
        counter: CollectiveCounter,
        *,
        cuda_aware: bool = False,
    ) -> None:
        self.rank, self.size, self._comm = comm.rank, comm.size, comm
        self._cuda_aware, self._watched, self.timeout_s = cuda_aware, watched, watched.timeout_s
        self._counter = watched.register(counter)
        self._wait = watched("", self._counter)  # reused: collectives never overlap
        self._family: WeakSet[MpiCommunicator] = WeakSet()  #: all made from the same communicator

    def allgather(self, send: Array, receive: Array, counts: Counts) -> None:
        begin = sum(counts[: self.rank])
        own = receive[begin : begin + counts[self.rank]]
        if not _same_place(send, own):
            own[...] = send
        with self.trace.collective(), self._waits("allgather"):
            host = self._host(receive, read=True)
            if host.size > self.most_values:
                here = host[begin : begin + counts[self.rank]]
                self._send_pieces([here] * self.size, parts_of(host, counts))
            elif len(set(counts)) == 1:
                self._comm.Allgather(MPI.IN_PLACE, host)
            else:
                self._comm.Allgatherv(MPI.IN_PLACE, [host, list(counts)])
            self._return(host, receive)

    def alltoall(
        self,
        send: Array,
        send_counts: Counts,
        receive: Array,
        receive_counts: Counts,
        *,
        most: int | None = None,
    ) -> None:
        with self.trace.collective(), self._waits("alltoall"):
            host, sent = self._host(receive, read=False), self._host(send, read=True)
            if (most or max(host.size, sent.size)) > self.most_values:
                self._send_pieces(parts_of(sent, send_counts), parts_of(host, receive_counts))
            else:
                self._comm.Alltoallv([sent, list(send_counts)], [host, list(receive_counts)])
            self._return(host, receive)

    def broadcast(self, array: Array, root: int = 0) -> None:
        with self.trace.collective(), self._waits("broadcast"):
            host = self._host(array, read=True)
            for piece in pieces_of(host, self.most_values):
                self._comm.Bcast(piece, root)
            self._return(host, array)

    def sum_integers(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        total = values.copy()
        with self._waits("sum_integers"):
            for piece in pieces_of(total, self.most_values):
                self._comm.Allreduce(MPI.IN_PLACE, piece)
        return total

    def _send_pieces(self, sent: Sequence[Array], received: Sequence[Array]) -> None:
        """Send an array to each rank, and receive one from each, in messages small enough for MPI.

        An array already in its receive position is not copied.
        """
        own = received[self.rank]
        if not _same_place(sent[self.rank], own):
            own[...] = sent[self.rank]
        requests = []
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            for piece in pieces_of(received[source], self.most_values):
                requests.append(self._comm.Irecv(piece, source, PIECES))
            for piece in pieces_of(sent[to], self.most_values):
                requests.append(self._comm.Isend(piece, to, PIECES))
        # bounded: its callers are in _waits()
        MPI.Request.Waitall(requests)

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        with self._waits("allgather_object"):
            counts = np.full(self.size, len(data), np.int64)
            self._comm.Allgather(MPI.IN_PLACE, counts)
            gathered = np.empty(counts.sum(), np.uint8)
            parts = parts_of(gathered, counts.tolist())
            if gathered.size > self.most_values:
                self._send_pieces([np.frombuffer(data, np.uint8)] * self.size, parts)
            else:
                self._comm.Allgatherv(data, [gathered, counts.tolist()])
        return [part.tobytes() for part in parts]

    def duplicate(self) -> MpiCommunicator:
        level = MPI.Query_thread()
        self.raise_together(
            None
            if level == MPI.THREAD_MULTIPLE
            else "communication during training needs MPI_THREAD_MULTIPLE, but this "
            f"{MPI.get_vendor()[0]} gives thread level {level}"
        )
        with self._waits("Communicator.duplicate()"):
            return self._of(self._comm.Dup(), 0)

    def split(self, group: int) -> MpiCommunicator:
        with self._waits("Communicator.split()"):
            return self._of(cast(MPI.Intracomm, self._comm.Split(group, self.rank)), group)

    def rebind(self, other: Communicator) -> None:
        super().rebind(other)
        self._family.add(self)

    def close(self) -> None:
        comm, self._comm = self._comm, cast(MPI.Intracomm, Closed())
        if isinstance(comm, MPI.Intracomm) and not MPI.Is_finalized():
            with self._watched("Communicator.close()"):
                comm.Free()

    def _waits(self, name: str) -> AbstractContextManager[object]:
        """Count the start of a collective, and return a context manager to bound its wait."""
        self._counter.enter()
        wait = self._wait
        wait.name, wait.problem = name, self._problem
        return wait

    def _of(self, comm: MPI.Intracomm, group: int) -> MpiCommunicator:
        """Wrap a communicator of all or some of these ranks, with the same settings."""
        places = MPI.Group.Translate_ranks(comm.group, None, self._comm.group)
        counter = self._counter.child(tuple(self.world_ranks[place] for place in places), group)
        made = self._part(comm, counter)
        made.trace, made._family = self.trace, self._family
        self._family.add(made)
        return made

    def _part(self, comm: MPI.Intracomm, counter: CollectiveCounter) -> MpiCommunicator:
        return MpiCommunicator(comm, self._watched, counter, cuda_aware=self._cuda_aware)

    def endpoint(self, peers: Sequence[int], *, serving: bool) -> Endpoint:
        from .endpoint import MpiEndpoint

        return MpiEndpoint(self._comm, peers, serving, self._watched, self.world_ranks)

    def messages(self) -> Messages:
        from .messages import MpiMessages

        return MpiMessages(self._comm, self._watched, self._counter, cuda_aware=self._cuda_aware)

    @property
    def world_ranks(self) -> tuple[int, ...]:
        return self._counter.ranks

    def require_whole(self) -> None:
        require_whole(MPI.COMM_WORLD.size, MPI.get_vendor()[0], trains=True)

    @property
    def host(self) -> str:
        return MPI.Get_processor_name()

    def _host(self, array: Array, *, read: bool) -> Array:
        """Return an array for MPI: the array itself, or its copy in pinned host memory.

        Args:
            read: the present contents matter. CuPy calls return before the GPU is done, and MPI
                knows nothing of streams, so the current stream is synchronized.
        """
        xp = array_module(array)
        if xp is np:
            return array
        if self._cuda_aware:
            # bounded: this rank's GPU: waiting ranks end the job
            xp.cuda.get_current_stream().synchronize()
            return array
        return to_host(array) if read else pinned_like(array)

    def _return(self, host: Array, array: Array) -> None:
        if host is not array:
            to_device(host, array)


def _end_job_from_another_thread() -> None:
    """End the job while another thread waits inside MPI.

    Only THREAD_MULTIPLE allows MPI_Abort then. Otherwise this process exits without MPI_Finalize,
    so mpiexec ends the job.
    """
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        MPI.COMM_WORLD.Abort(1)
    os._exit(1)


def _same_place(a: Array, b: Array) -> bool:
    if array_module(a) is np:
        return MPI.Get_address(a) == MPI.Get_address(b)
    return bool(a.data.ptr == b.data.ptr)
