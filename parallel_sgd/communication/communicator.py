"""What the rest of the project knows of communication: ranks and a few collectives on arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Protocol, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ..errors import DivergedError, NotFinite, SharedError, SharedProblem, UserError
from ..trace import NO_TRACE, Trace
from ..validation import BOTH, choice, mapping, shown, with_plain_paths
from .endpoint import Endpoint
from .messages import Array, Messages
from .phrases import different_calls, different_values, in_words
from .serialization import packed, unpacked
from .timeouts import checked_timeout, default_timeout

Counts = Sequence[int]
Result = TypeVar("Result")

PROBLEM = "raise_together"

FINGERPRINT_FACTOR = 1_000_003
"""Several numbers become one sign: times this, plus the next."""

FINGERPRINT_PRIME = 2**24 - 3
"""Signs are sent modulo this: their squares, added up over 2**15 ranks, are still int64."""


class ConsistencyCheck(Protocol):
    """What all ranks must have in common as they agree: see `Communicator.agree`.

    Attributes:
        note: a number of this rank's, 0 or more, that the others are to hear of.
        notes: the sum of all ranks' notes, as the ranks have agreed.
        mark: of this rank's minibatch, from 1 to below `FINGERPRINT_PRIME`; 0: it has none. Set by
            `fingerprint`.
        marks_equal: whether all ranks had one and the same mark as they agreed.
    """

    note: int
    notes: int
    mark: int
    marks_equal: bool

    def fingerprint(self, steps: int) -> int:
        """A whole number, another one where a fact is another one: see `FINGERPRINT_FACTOR`. Local.

        Args:
            steps: taken since the ranks have agreed, the same on all.
        """

    def facts(self) -> dict[str, Any]:
        """The facts behind the latest sign, by name, for the error where they differ. Local."""


class Communicator(ABC):
    """A fixed group of ranks that call the same collectives in the same order.

    Attributes:
        rank: this process's (or thread's) number, 0 to ``size - 1``.
        size: how many ranks train together.
        timeout_s: longest wait of this rank for others, in seconds.
        trace: where this rank says what its time goes into; duplicates and parts made later share
            it. Nothing is kept unless it is set to a `Trace`.
        consistency: what `agree` compares between the ranks beside its arguments.
        learners: how many have been made with it.
        fault_tolerant: training can continue on the remaining ranks, by `reconfigure`; a wait for a
            failed rank raises a `RanksLost` (`parallel-sgd run --survive`).
        generation: how often they have.
        fruitless: reconfigurations in a row in which no rank was missing; 0 after progress.

    Every method here is collective unless it says local. No wait is endless: after the
    communicator's `timeout_s` the waiting rank says for what it waited and ends the job.
    """

    rank: int
    size: int
    timeout_s: float
    trace: Trace = NO_TRACE
    consistency: ConsistencyCheck | None = None
    learners: int = 0
    fault_tolerant: ClassVar[bool] = False
    generation: int = 0
    fruitless: int = 0
    # `worlds` makes the first ones, of the kinds that are known above this file.
    _make_world: ClassVar[Callable[[float, bool], Communicator]]
    _make_single: ClassVar[Callable[[], Communicator]]
    _hosts: list[str] | None = None
    _problem: str | None = None
    # Of this rank, which the others are about to hear of. If they do not come soon, it is printed:
    # what follows may end this rank before they do.

    @staticmethod
    def world(*, timeout_s: float | None = None, cuda_aware: bool = False) -> Communicator:
        """All ranks that mpiexec started; a single one where the program was started without it.

        Args:
            timeout_s: longest wait in a collective, and here for the other ranks, in seconds; if
                not given, that of `parallel-sgd run --wait-timeout-s`, or 600.
            cuda_aware: pass CuPy arrays to MPI as they are, because you know that your MPI can
                take them. By default they are staged through pinned host memory.
        Raises:
            UserError: an argument is not as required. Or more processes were started than MPI
                sees: mpiexec and mpi4py belong to different MPIs, torchrun is no launcher of
                MPI's, or there is no MPI library. Or a rank that has made the world has started
                this process.

        Collective. An uncaught exception on any rank ends the job on all: under mpiexec from
        `import parallel_sgd` on. `sys.exit` on one rank, or its program's end, does so within
        seconds where another rank waits for it.
        """
        seconds = default_timeout() if timeout_s is None else checked_timeout(timeout_s)
        return Communicator._make_world(seconds, choice("cuda_aware", cuda_aware, BOTH))

    def require_whole(self) -> None:
        """Refuse to train where more processes were started for that than MPI has ranks. Local.

        Raises:
            UserError: by torchrun or `multiprocessing`, say.
        """
        return None  # what threads are ranks of is whole

    @staticmethod
    def single() -> Communicator:
        """A world of one rank, without MPI. Local."""
        return Communicator._make_single()

    @abstractmethod
    def allgather(self, send: Array, receive: Array, counts: Counts) -> None:
        """Put every rank's `send` into every rank's `receive`, in rank order.

        Args:
            send: `counts[rank]` values; may be the very part of `receive` that it would fill.
            receive: ``sum(counts)`` values, written.
            counts: values from each rank, the same on all.
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
            send, send_counts: ``sum(send_counts)`` values, `send_counts[j]` of them for rank j.
            receive, receive_counts: written, `receive_counts[k]` values from rank k.
            most: values that any rank sends or receives in all, the same on all ranks; None where
                each has much less than 2^30.
        """

    @abstractmethod
    def broadcast(self, array: Array, root: int = 0) -> None:
        """Make `array` on all ranks what it is on `root`, in place."""

    @abstractmethod
    def sum_integers(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The sum over the ranks of a few int64 (exact, so the order does not matter)."""

    def allgather_object(self, item: Any) -> list[Any]:
        """Every rank's `item`, in rank order: for small things at the start and in errors.

        Args:
            item: None, a bool, int, float, complex, str, bytes, Path, one of NumPy's arrays (not of
                objects) and numbers, or a tuple, list, dict, set or frozenset of such; arrives as
                it is. Nothing is pickled.
        Raises:
            SharedError: on all ranks, if one has anything else for an item, or has called
                `raise_together` instead, with a problem.
        """
        return self._gather("allgather_object", item)

    @abstractmethod
    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order: for `allgather_object`."""

    @abstractmethod
    def duplicate(self) -> Communicator:
        """The same ranks, apart: its collectives may run in another thread, beside these.

        Raises:
            SharedError: on all ranks, where MPI does not allow that (no MPI_THREAD_MULTIPLE).
        """

    @abstractmethod
    def split(self, group: int) -> Communicator:
        """Those of these ranks that give the same number, in the same order."""

    @abstractmethod
    def endpoint(self, peers: Sequence[int], *, serving: bool) -> Endpoint:
        """This rank's side of messages with some of the others, or with itself.

        Args:
            peers: whom it hears and talks to.
            serving: whether it gets requests and replies to them, or makes them. A rank may have
                one endpoint of each side.

        Local. Make it on a communicator of its own (`duplicate`), in which nobody else has one.
        """

    @abstractmethod
    def messages(self) -> Messages:
        """For messages to and from any of the ranks, beside the collectives.

        Local. Two that are in use at the same time need a communicator each (`duplicate`).
        """

    def revoke(self) -> None:
        """Interrupt all ranks, wherever they wait, so that they call `reconfigure`. Communicators
        made of this one are invalid afterwards. Local; needs `fault_tolerant`."""
        raise NotImplementedError(f"{type(self).__name__} does not survive its ranks")

    def reconfigure(self, *, allow_join: bool) -> None:
        """Go on with the ranks that are left: `rank`, `size`, and `world_ranks` become theirs.

        Args:
            grows: whether ranks in reserve may join, as far as this rank is concerned. They do
                where all allow it.

        Collective among all that are left, after `revoke` on any of them.
        """
        before = self.world_ranks
        try:
            self._reconfigure(allow_join=allow_join)
        finally:
            self.fruitless = self.fruitless + 1 if self.world_ranks == before else 0

    def _reconfigure(self, *, allow_join: bool) -> None:
        raise NotImplementedError(f"{type(self).__name__} does not survive its ranks")

    def end_replay_log(self) -> None:  # noqa: B027
        """The ranks begin to train: those that join later know what was done together so far."""

    def rebind(self, other: Communicator) -> None:
        """Go on as another one, whose ranks have taken the place of this one's, for all who hold
        this one. Local."""
        trace = self.trace
        self._hosts = None
        self.__dict__.update(other.__dict__)
        self.trace = trace

    @property
    def failed_ranks(self) -> Sequence[int]:
        """Those of the world that are known to have died. Local."""
        return ()

    @property
    def spares(self) -> int:
        """How many ranks are missing of the whole group, and in reserve. Local."""
        return 0

    def close(self) -> None:  # noqa: B027
        """Give back what this communicator takes up in MPI, which has room for some thousands.

        Nothing may be under way on it. Those that were made of it live on. Later calls are refused;
        closing it again does nothing. Collective, but waits for nobody.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, frames: object) -> None:
        """Closed, unless an error may have kept other ranks from coming here."""
        if error is None or isinstance(error, SharedError):
            self.close()

    @property
    def world_ranks(self) -> Sequence[int]:
        """What these ranks are called in the whole world, in their order: errors do so. Local."""
        return range(self.size)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum_integers(np.zeros(1, np.int64))

    @property
    @abstractmethod
    def host(self) -> str:
        """The name of the machine that this rank runs on. Local."""

    @property
    def hosts(self) -> list[str]:
        """The machine of every rank. Collective at its first use."""
        if self._hosts is None:  # cached_property, before Python 3.12, lets one thread in at a time
            self._hosts = self.allgather_object(self.host)
        return self._hosts

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks of its machine. Collective at the first use."""
        return self.hosts[: self.rank].count(self.host)

    @property
    def local_size(self) -> int:
        """How many ranks share this rank's machine. Collective at the first use."""
        return self.hosts.count(self.host)

    def print(self, *values: object, **options: Any) -> None:
        """Python's `print` on rank 0, and nothing on the others: so that what all ranks have
        computed together is said once. Local."""
        if self.rank == 0:
            print(*values, **options)

    def raise_together(self, problem: str | None) -> None:
        """Raise on every rank if any rank has a problem; return if none has.

        Args:
            problem: what is wrong on this rank, in one line, or None.
        Raises:
            SharedError: on all ranks, naming the ranks that have the problem, or what a rank gives
                that is no text.
        """
        if not isinstance(problem, str | None):  # the other ranks wait, and must be told
            problem = f"problem={shown(problem)} must be a text, or None"
        self._problem = problem
        try:
            self._gather(PROBLEM, problem)
        finally:
            self._problem = None

    def _gather(self, kind: str, item: Any) -> list[Any]:
        """Every rank's item, where no rank has come with a problem instead."""
        try:
            own = packed([kind, item])
        except UserError as error:
            self.raise_together(str(error))
            raise
        everywhere = [unpacked(theirs) for theirs in self._allgather_bytes(own)]
        problems = [theirs if kind == PROBLEM else None for kind, theirs in everywhere]
        where = {p: [k for k, q in enumerate(problems) if q == p] for p in problems if p}
        if where:
            diverged = all(isinstance(text, NotFinite) for text in where)
            raise (DivergedError if diverged else SharedError)(
                "; ".join(
                    text if isinstance(text, SharedProblem) else f"{text} (on {self._name(ranks)})"
                    for text, ranks in where.items()
                )
            )
        different = different_calls([kind for kind, _ in everywhere], self.world_ranks)
        if different:
            raise SharedError(different)
        return [theirs for _, theirs in everywhere]

    def agree(
        self,
        problem: str | None,
        samples: int = 0,
        *,
        equal: Mapping[str, int] | None = None,
        steps: int = 1,
    ) -> int:
        """The sum of `samples` over the ranks, once no rank is known to have a problem.

        The one place where ranks in training wait for each other before anything is changed: a rank
        that cannot go on calls this with its problem where the others call it with their samples.

        Args:
            problem: what is wrong on this rank, in one line, or None.
            samples: of this rank.
            alike: what must be the same on all ranks, by name, beside what they have `consistency`.
            steps: that the ranks have taken since they agreed; so that what takes a while is
                compared now and then.
        Raises:
            SharedError: on all ranks, if any has a problem, or if what must be the same differs.

        Cost: one sum of seven integers.
        """
        consistency = self.consistency if self.size > 1 else None
        fingerprint = consistency.fingerprint(steps) if consistency else 0
        for value in equal.values() if equal else ():
            fingerprint = fingerprint * FINGERPRINT_FACTOR + value
        fingerprint %= FINGERPRINT_PRIME
        note, mark = (consistency.note, consistency.mark) if consistency else (0, 0)
        problems = int(problem is not None)
        own = np.array(
            [samples, problems, fingerprint, fingerprint * fingerprint, note, mark, mark * mark],
            np.int64,
        )
        self._problem = problem
        try:
            with self.trace.span("wait"):
                sums = self.sum_integers(own).tolist()
        finally:
            self._problem = None
        total, problems, fingerprints, squares, notes, marks, mark_squares = sums
        if problems:
            self.raise_together(problem)
        if self.size * squares != fingerprints * fingerprints:  # equal only where all signs are
            self.require_agreement(
                {**(consistency.facts() if consistency else {}), **(equal or {})}
            )
        if consistency:
            consistency.notes = notes
            consistency.marks_equal = marks > 0 and self.size * mark_squares == marks * marks
        return int(total)

    def together(self, prepare: Callable[[], Result]) -> Result:
        """Call `prepare` on every rank; if it raises a UserError on any, all raise.

        Args:
            prepare: anything local, such as loading a file that a rank may lack.
        Raises:
            SharedError: on all ranks, with the lines of those that failed.
        """
        result, problem = None, None
        try:
            result = prepare()
        except UserError as error:
            problem = str(error)
        self.raise_together(problem)
        return cast(Result, result)

    def require_agreement(self, facts: dict[str, Any]) -> None:
        """Check that all ranks were given the same.

        Args:
            facts: what must agree, by name; compared by `repr`. A rank that lacks one differs.
        Raises:
            SharedError: on all ranks, naming the first fact that differs and who has what, or what
                a rank gives that is no mapping from names.
        """
        try:
            named = mapping("facts", facts, optional=False)
        except UserError as error:
            self.raise_together(str(error))  # the other ranks wait, and must be told
            raise
        texts = {name: with_plain_paths(repr(value)) for name, value in named.items()}
        everywhere = self._gather("require_agreement", texts)
        for name in dict.fromkeys(name for theirs in everywhere for name in theirs):
            values = [theirs.get(name, "nothing") for theirs in everywhere]
            if different := different_values(name, values, self.world_ranks):
                raise SharedError(different)

    def _name(self, ranks: Sequence[int]) -> str:
        return in_words([self.world_ranks[rank] for rank in ranks])


class Closed:
    """Takes the place of what a closed communicator worked with, and refuses all use."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UserError("this communicator is closed: after close() it cannot be used any more")
