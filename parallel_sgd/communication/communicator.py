"""Define the communicator: ranks, and their collectives on arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, Self

import numpy as np

from ..errors import SharedError, UserError
from ..validation import BOTH, choice
from .agreement import Agreement
from .endpoint import Endpoint
from .messages import Array, Messages
from .timeouts import checked_timeout, default_timeout

Counts = Sequence[int]


class Communicator(Agreement):
    """A fixed group of ranks, which call the same collectives in the same order.

    Attributes:
        rank: this process's (or thread's) number, 0 to ``size - 1``.
        size: number of ranks.
        timeout_s: longest wait of this rank for other ranks, in seconds.
        trace: records the time of this rank's work; shared by later duplicates and parts. Records
            nothing unless set to a `Trace`.
        consistency: compared between the ranks by `agree`, in addition to the arguments of `agree`.
        learners: number of learners made with this communicator.
        fault_tolerant: training can continue on the remaining ranks, by `reconfigure`; a wait for a
            failed rank raises `RanksLost` (`parallel-sgd run --survive`).
        generation: number of reconfigurations so far.
        fruitless: number of reconfigurations in a row without a missing rank; 0 after progress.
        joined: this rank was a standby rank.

    Every method is collective unless its documentation says local. Every wait is bounded: after
    `timeout_s` the waiting rank reports the collective's name and ends the job.
    """

    rank: int
    size: int
    timeout_s: float
    learners: int = 0
    fault_tolerant: ClassVar[bool] = False
    generation: int = 0
    fruitless: int = 0
    joined: bool = False
    # Set by `world`: the concrete communicators are defined above this file.
    _make_world: ClassVar[Callable[[float, bool], Communicator]]
    _make_of_group: ClassVar[Callable[[Any, float], Communicator]]
    _make_single: ClassVar[Callable[[], Communicator]]
    _hosts: list[str] | None = None

    @staticmethod
    def world(*, timeout_s: float | None = None, cuda_aware: bool = False) -> Communicator:
        """Return all ranks of this job, or a single rank without a launcher.

        The ranks are those started by mpiexec, srun or `parallel-sgd run`, over MPI. Otherwise they
        are those of PyTorch's default process group, if it is initialized, or of torchrun and
        similar launchers (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), without MPI. Then no
        process group is made: see `parallel_sgd.torch.init_process_group`.

        Args:
            timeout_s: longest wait in a collective, and here for the other ranks, in seconds; by
                default the value of `parallel-sgd run --wait-timeout-s`, or 600.
            cuda_aware: pass CuPy arrays to MPI directly, because you know your MPI accepts device
                memory. By default arrays are staged through pinned host memory.
        Raises:
            UserError: an argument is invalid. Or more processes were started than MPI sees: mpiexec
                and mpi4py belong to different MPIs, or there is no MPI library. Or ranks cannot
                connect. Or this process was started by a rank with a world of its own.

        Collective. From `import parallel_sgd` on, an uncaught exception on any rank ends the job on
        all ranks under mpiexec. `sys.exit` on one rank, or the end of its program, ends the job
        within seconds if another rank waits for that rank.
        """
        seconds = default_timeout() if timeout_s is None else checked_timeout(timeout_s)
        return Communicator._make_world(seconds, choice("cuda_aware", cuda_aware, BOTH))

    @staticmethod
    def of_process_group(group: Any = None, *, timeout_s: float | None = None) -> Communicator:
        """Return the ranks of a process group of `torch.distributed`, without MPI.

        Args:
            group: the process group; None: the default one. Used only here, for the ranks to find
                each other: the communicator has connections of its own.
            timeout_s: as for `world`.
        Raises:
            UserError: there is no such group, this process is not in the group, or ranks cannot
                connect.

        Collective over the group. Cost: some milliseconds, and an open file for each other rank, as
        for each duplicate and part; the process's limit of open files is raised if needed.
        Rank k is the group's rank k; error texts and `world_ranks` have the default group's number.
        Connections are TCP over IPv4; GLOO_SOCKET_IFNAME selects the network interface.
        """
        seconds = default_timeout() if timeout_s is None else checked_timeout(timeout_s)
        return Communicator._make_of_group(group, seconds)

    def require_whole(self) -> None:
        """Check that MPI has as many ranks as processes were started for training. Local.

        Raises:
            UserError: more processes were started, for example by torchrun or `multiprocessing`.
        """
        return None  # a world of threads is always complete

    def require_fixed_ranks(self, problem: str) -> None:
        """Refuse fault-tolerant ranks, for work that needs all ranks to its end. Local.

        Args:
            problem: the text of the error.
        Raises:
            UserError: ranks may fail and be replaced.
        """
        return None  # the ranks stay until the end of the job

    @staticmethod
    def single() -> Communicator:
        """Return a world of one rank, without MPI. Local."""
        return Communicator._make_single()

    @abstractmethod
    def allgather(self, send: Array, receive: Array, counts: Counts) -> None:
        """Put every rank's `send` into every rank's `receive`, in rank order.

        Args:
            send: `counts[rank]` values; may be this rank's own part of `receive`.
            receive: ``sum(counts)`` values, written.
            counts: number of values from each rank, the same on all ranks.
        """

    @abstractmethod
    def alltoall(
        self,
        send: Array,
        send_counts: Counts,
        receive: Array,
        receive_counts: Counts,
        *,
        most: int | None = None,
    ) -> None:
        """Send the j-th part of `send` to rank j; receive the parts for this rank in rank order.

        Args:
            send, send_counts: ``sum(send_counts)`` values, `send_counts[j]` for rank j.
            receive, receive_counts: written, `receive_counts[k]` values from rank k.
            most: upper bound on the values sent or received by any rank, the same on all ranks;
                None if every rank has much less than 2^30.
        """

    @abstractmethod
    def broadcast(self, array: Array, root: int = 0) -> None:
        """Copy `array` from rank `root` to all ranks, in place."""

    def allgather_object(self, item: Any) -> list[Any]:
        """Return every rank's `item`, in rank order: for small objects at the start and in errors.

        Args:
            item: None, a bool, int, float, complex, str, bytes, Path, a NumPy array (not of
                objects) or number, or a tuple, list, dict, set or frozenset of these. The type is
                preserved. Nothing is pickled.
        Raises:
            SharedError: on all ranks, if the item of any rank has another type, or if a rank called
                `raise_together` with a problem instead.
        """
        return self._gather("allgather_object", item)

    @abstractmethod
    def duplicate(self) -> Communicator:
        """Return a separate communicator of the same ranks, for collectives in a second thread.

        Raises:
            SharedError: on all ranks, if MPI does not support threads (no MPI_THREAD_MULTIPLE).
        """

    @abstractmethod
    def split(self, group: int) -> Communicator:
        """Return a communicator of the ranks with the same `group` number, in the same order."""

    @abstractmethod
    def endpoint(self, peers: Sequence[int], *, serving: bool) -> Endpoint:
        """Return this rank's endpoint for requests and replies. Local.

        Args:
            peers: ranks to exchange messages with; may include this rank.
            serving: receive requests and send replies, instead of the reverse. A rank may have one
                endpoint of each kind.

        Use a separate communicator for each endpoint (`duplicate`).
        """

    @abstractmethod
    def messages(self) -> Messages:
        """Return a channel for array messages between ranks, independent of the collectives. Local.

        Two channels in use at the same time need a communicator each (`duplicate`).
        """

    def revoke(self) -> None:
        """Interrupt all waiting ranks, so that every rank calls `reconfigure`. Local.

        Communicators made from this one are invalid afterwards. Needs `fault_tolerant`.
        """
        raise NotImplementedError(f"{type(self).__name__} is not fault-tolerant")

    def reconfigure(self, *, allow_join: bool) -> None:
        """Continue with the remaining ranks: update `rank`, `size` and `world_ranks`.

        Args:
            allow_join: this rank allows standby ranks to join. Standby ranks join only if all ranks
                allow it.

        Collective among all remaining ranks, after `revoke` on any rank.
        """
        before = self.world_ranks
        try:
            self._reconfigure(allow_join=allow_join)
        finally:
            self.fruitless = self.fruitless + 1 if self.world_ranks == before else 0

    def _reconfigure(self, *, allow_join: bool) -> None:
        raise NotImplementedError(f"{type(self).__name__} is not fault-tolerant")

    def end_replay_log(self) -> None:
        """Stop recording collectives for ranks that join later: training begins."""

    def rebind(self, other: Communicator) -> None:
        """Take over the state of another communicator, for all holders of this object. Local.

        Args:
            other: a communicator of the ranks that replace this one's. The trace is kept.
        """
        trace = self.trace
        self._hosts = None
        self.__dict__.update(other.__dict__)
        self.trace = trace

    @property
    def failed_ranks(self) -> Sequence[int]:
        """Failed ranks known so far, by world rank. Local."""
        return ()

    @property
    def spares(self) -> int:
        """Number of missing ranks for which a standby rank is available. Local."""
        return 0

    def close(self) -> None:
        """Free the communicator's resources in MPI.

        MPI has room for some thousands of communicators. No operation may be pending. Communicators
        made from this one stay valid. Later calls raise a UserError; a second `close` does nothing.
        Collective, but waits for no rank.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, frames: object) -> None:
        """Close the communicator, unless an error may keep other ranks from closing theirs."""
        if error is None or isinstance(error, SharedError):
            self.close()

    def barrier(self) -> None:
        """Wait until every rank has called `barrier`."""
        self.sum_integers(np.zeros(1, np.int64))

    @property
    @abstractmethod
    def host(self) -> str:
        """Name of this rank's machine. Local."""

    @property
    def hosts(self) -> list[str]:
        """Machine name of every rank. Collective on first use."""
        if self._hosts is None:  # cached_property locks threads until Python 3.12
            self._hosts = self.allgather_object(self.host)
        return self._hosts

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks of its machine. Collective on first use."""
        return self.hosts[: self.rank].count(self.host)

    @property
    def local_size(self) -> int:
        """Number of ranks on this rank's machine. Collective on first use."""
        return self.hosts.count(self.host)

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 only. Local.

        Args:
            values, options: as for Python's `print`.
        """
        if self.rank == 0:
            print(*values, **options)


class Closed:
    """Stand-in for the internals of a closed communicator: refuses all use."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UserError("this communicator is closed: after close() it cannot be used any more")
