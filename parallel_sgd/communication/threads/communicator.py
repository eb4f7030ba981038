"""A world of threads in a process, with the same collectives, for tests and simulation."""

from __future__ import annotations

import copy
import platform
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ... import runtime
from ...errors import RankFailed, RanksLost, SharedError, UserError
from ...runtime import SimulatedFailure
from ...validation import integer, kind_of, line_of
from ..background import end_rank_tasks
from ..communicator import Closed, Communicator, Counts
from ..endpoint import Endpoint
from ..liveness.watchdog import REPORT_PROBLEM_AFTER_S
from ..messages import Array, Messages
from ..phrases import different_calls, in_words, waiting_for_finished
from ..timeouts import TIMEOUT_S, checked_timeout
from .endpoint import Mailbox, ThreadEndpoint, ThreadMessages

Result = TypeVar("Result")

#: Time for interrupted ranks to end: at their next collective, and then in other Python code.
COLLECTIVE_S, PYTHON_S = 0.5, 3.0

MOST_THREADS = 1 << 15  #: about Linux's limit for a process; a collective takes size² steps


class ThreadWorld:
    """State shared by the ranks of a process: each rank's argument, and their meetings.

    Args:
        size: number of ranks.
        timeout_s: longest wait of a rank, in seconds.
        parent: the enclosing world of a subworld, with the world ranks of this subworld.
        world_ranks: numbers of the ranks in error texts, if not 0, 1, 2, …
        copies: copy what ranks offer: a rank may go on, and change its arrays, while others still
            read them. It goes on if it hears of a failure, or has all that it needs.
    """

    def __init__(
        self,
        size: int,
        timeout_s: float = TIMEOUT_S,
        parent: tuple[ThreadWorld, Sequence[int]] | None = None,
        world_ranks: Sequence[int] | None = None,
        *,
        copies: bool = False,
    ) -> None:
        self.size = size
        self.timeout_s, self.copies = timeout_s, copies
        #: world ranks
        self.ranks = tuple(world_ranks or (range(size) if parent is None else parent[1]))
        #: world ranks of finished programs
        self.finished: set[int] = set() if parent is None else parent[0].finished
        self._offers: dict[int, list[Any]] = {}  # of the ranks, by meeting
        self.mailbox = Mailbox(self.ranks, self.finished)
        self._changed = runtime.Condition()
        self._meetings = 0  # completed meetings
        self._entered = [0] * size  # meetings entered by each rank
        self._arrived: Counter[int] = Counter()  # ranks, by meeting
        self._subworlds: dict[tuple[int, int], ThreadWorld] = {}
        self._closed = 0  # ranks that have closed their communicator
        self._lock = runtime.Lock()

    def communicator(self, rank: int) -> Communicator:
        return ThreadCommunicator(self, rank)

    def subworld(self, number: int, group: int, members: Sequence[int]) -> ThreadWorld:
        """Return the world of some of these ranks, the same object for all members.

        Args:
            number: count of earlier calls of `duplicate` and `split` on each rank.
            group: the number given by its members.
            members: ranks in this world.
        """
        with self._lock:
            if (number, group) not in self._subworlds:
                ranks = [self.ranks[member] for member in members]
                subworld = ThreadWorld(
                    len(members), self.timeout_s, (self, ranks), copies=self.copies
                )
                self._subworlds[number, group] = subworld
                if self.mailbox.aborted:
                    subworld.abort()
                if self.mailbox.revoked:
                    subworld.revoke()
            return self._subworlds[number, group]

    def meet(
        self,
        rank: int,
        name: str,
        problem: str | None,
        needs: Sequence[int],
        offer: Any = None,
    ) -> int:
        """Wait until ranks have come. Return the number of the meeting.

        Args:
            rank: this rank.
            name: name of the collective, for errors.
            problem: this rank's problem, about to be shared; printed if any rank is late.
            needs: ranks to wait for.
            offer: this rank's argument, if this is the first meeting of a collective.
        Raises:
            RankFailed: a rank has ended with an error.
            RanksLost: a rank has failed.
            UserError: a rank has finished, or has not come in time.
        """
        with self._changed:
            self.require_no_failure(name)
            number = self._entered[rank]
            if offer is not None:
                offers = self._offers.setdefault(number, [None] * self.size)
                offers[rank] = copy.deepcopy(offer) if self.copies else offer
            self._entered[rank] += 1
            self._arrived[number] += 1
            if self._arrived[number] == self.size:
                del self._arrived[number]
                self._offers.pop(number - 1, None)  # all ranks have taken what they need
                self._meetings = number + 1
                self._changed.notify_all()
                return number
            if self.copies:
                self._changed.notify_all()  # a rank may need this one alone

            def complete() -> bool:
                if len(needs) == self.size:
                    return self._meetings > number
                return all(self._entered[rank] > number for rank in needs)

            def decided() -> bool:
                over = complete() or self.mailbox.revoked
                return over or self.mailbox.aborted or bool(self._missing(number))

            in_time = self._changed.wait_for(decided, min(self.timeout_s, REPORT_PROBLEM_AFTER_S))
            if not in_time and problem:
                print(
                    f"parallel_sgd: {problem} (on rank {self.ranks[rank]}, which now waits for the "
                    f"other ranks, to report it)",
                    file=sys.stderr,
                    flush=True,
                )
            in_time = in_time or self._changed.wait_for(decided, self.timeout_s)
            if complete():
                return number
            self.require_no_failure(name)
            waits = f"rank {self.ranks[rank]} waits in {name}"
            if self.mailbox.aborted:
                raise RankFailed(f"{waits} for a rank that failed")
            if missing := self._missing(number):
                raise UserError(waiting_for_finished(missing, waits))
            others = [self.ranks[k] for k in range(self.size) if self._entered[k] <= number]
            raise UserError(
                f"{waits} for more than timeout_s={self.timeout_s:g} s: it has waited for "
                f"{in_words(others)}"
            )

    def offers(self, number: int) -> list[Any]:
        """Return what the ranks have offered in a meeting; None for ranks that have not come."""
        return self._offers[number]

    def require_no_failure(self, name: str) -> None:
        if self.mailbox.revoked:
            raise RanksLost(f"a rank has failed: found in {name}")

    def require_not_aborted(self) -> None:
        if self.mailbox.aborted:
            raise RankFailed("a rank has failed, or was interrupted")

    def revoke(self) -> None:
        """Report a failed rank to every waiting rank, also in subworlds."""
        self._wake(revoked=True)

    def _missing(self, number: int) -> list[int]:
        """Return the ranks that finished before this meeting."""
        entered = zip(self.ranks, self._entered, strict=True)
        return [rank for rank, times in entered if rank in self.finished and times <= number]

    def leave(self, rank: int) -> None:
        """Record a finished rank of this (whole) world, and wake all waiting ranks."""
        self.finished.add(rank)
        self._wake()

    def close(self) -> bool:
        """Count a closed communicator. Return True for the last rank."""
        with self._lock:
            self._closed += 1
            return self._closed == self.size

    def forget(self, number: int, group: int) -> None:
        """Drop a subworld after all ranks have closed it."""
        with self._lock:
            del self._subworlds[number, group]

    def abort(self) -> None:
        """Make every waiting rank fail, also in subworlds."""
        self._wake(aborted=True)

    def _wake(self, **flags: bool) -> None:
        """Set flags of the mailboxes here and in subworlds, and wake all waiting ranks."""
        for world in self._all():
            with world._changed, world.mailbox.changed:
                vars(world.mailbox).update(flags)
                world._changed.notify_all()
                world.mailbox.changed.notify_all()

    def _all(self) -> list[ThreadWorld]:
        """Return this world and all its subworlds."""
        with self._lock:
            subworlds = list(self._subworlds.values())
        return [self, *(world for subworld in subworlds for world in subworld._all())]


class ThreadCommunicator(Communicator):
    """A thread's view of a `ThreadWorld`."""

    def __init__(
        self, world: ThreadWorld, rank: int, forget: Callable[[], None] = lambda: None
    ) -> None:
        """Make the communicator of a rank.

        Args:
            world: state shared by all ranks.
            rank: this rank.
            forget: called when the last rank has closed its communicator.
        """
        self._world, self.rank, self.size = world, rank, world.size
        self._subworlds_made, self._forget, self.timeout_s = 0, forget, world.timeout_s

    def allgather(self, send: Array, receive: Array, counts: Counts) -> None:
        def combine(offers: list[Array]) -> None:
            ends = np.cumsum(counts)
            for remote, begin, end in zip(offers, ends - counts, ends, strict=True):
                if end > begin:
                    receive[begin:end] = remote

        with self.trace.collective():
            self._collective("allgather", send, combine, _places(counts))

    def alltoall(
        self,
        send: Array,
        send_counts: Counts,
        receive: Array,
        receive_counts: Counts,
        *,
        most: int | None = None,
    ) -> None:
        def combine(offers: list[tuple[Array, Counts]]) -> None:
            at = 0
            for rank in _places(receive_counts):
                (remote, counts), n = offers[rank], receive_counts[rank]
                begin = sum(counts[: self.rank])
                receive[at : at + n] = remote[begin : begin + n]
                at += n

        with self.trace.collective():
            self._collective("alltoall", (send, send_counts), combine, _places(receive_counts))

    def broadcast(self, array: Array, root: int = 0) -> None:
        def combine(offers: list[Array]) -> None:
            if self.rank != root:
                array[...] = offers[root]

        with self.trace.collective():
            self._collective("broadcast", array, combine, [root])

    def sum_integers(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        total: npt.NDArray[np.int64] = self._collective(
            "sum_integers", values, partial(np.sum, axis=0)
        )
        return total

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        gathered: list[bytes] = self._collective("allgather_object", data, list)
        return gathered

    def duplicate(self) -> Communicator:
        return self._subcommunicator(0, range(self.size))

    def split(self, group: int) -> Communicator:
        groups = self.allgather_object(group)
        return self._subcommunicator(
            group, [k for k, remote in enumerate(groups) if remote == group]
        )

    def _subcommunicator(self, group: int, members: Sequence[int]) -> Communicator:
        key = self._subworlds_made, group
        world = self._world.subworld(*key, members)
        self._subworlds_made += 1
        forget = partial(self._world.forget, *key)
        made = ThreadCommunicator(world, members.index(self.rank), forget)
        made.trace = self.trace
        return made

    def close(self) -> None:
        world, self._world = self._world, cast(ThreadWorld, Closed())
        if isinstance(world, ThreadWorld) and world.close():
            self._forget()

    def endpoint(self, peers: Sequence[int], *, serving: bool) -> Endpoint:
        return ThreadEndpoint(self._world.mailbox, self.rank, peers, serving, self.timeout_s)

    def messages(self) -> Messages:
        return ThreadMessages(self._world.mailbox, self.rank, self.timeout_s)

    @property
    def world_ranks(self) -> tuple[int, ...]:
        return self._world.ranks

    @property
    def host(self) -> str:
        return platform.node()

    def _collective(
        self,
        name: str,
        item: Any,
        combine: Callable[[list[Any]], Any],
        needs: Sequence[int] | None = None,
    ) -> Any:
        """Offer `item`, wait for other ranks, and `combine` the list of offers.

        Args:
            needs: ranks whose offers count here; None: all. In a simulated schedule this
                fault-tolerant rank may go on as soon as these have come, as over MPI.
        """
        world = self._world
        if world.size == 1:
            return combine([item])
        try:
            everyone = range(world.size)
            needs = everyone if needs is None else needs
            goes_on = len(needs) < world.size and world.copies and runtime.chance()
            needs = needs if goes_on else everyone
            number = world.meet(self.rank, name, self._problem, needs, (name, item))
            offers = world.offers(number)
            different = different_calls([one[0] for one in offers if one], world.ranks)
            if different:
                raise SharedError(different)
            result = combine([one and one[1] for one in offers])
            try:
                world.meet(self.rank, name, None, () if goes_on else everyone)
                if runtime.scheduler() is not None:  # explored: of a rank that has left already
                    world.require_no_failure(name)
            except RanksLost:  # over MPI some ranks may come through, and others hear of a failure
                if not runtime.chance():
                    raise
        except (RankFailed, RanksLost, SimulatedFailure):
            raise
        except BaseException:
            world.abort()
            raise
        return result


def _places(counts: Counts) -> list[int]:
    """Return the ranks with values."""
    return [rank for rank, count in enumerate(counts) if count]


def simulate(
    size: int, function: Callable[[Communicator], Result], timeout_s: float = TIMEOUT_S
) -> list[Result]:
    """Run `function(comm)` on `size` logical ranks, a thread each, and return all results.

    Args:
        size: at least 1.
        function: run on each rank, with its communicator.
        timeout_s: longest wait of a rank for other ranks, in seconds.
    Returns:
        The result of each rank, in rank order.
    Raises:
        UserError: an argument is invalid.
        BaseException: the exception of the first failed rank, with a note that names the rank; the
            remaining ranks stop at their next collective.
        KeyboardInterrupt: the program, or the cell of a notebook, was interrupted. All ranks have
            ended, or end soon after.

    >>> simulate(3, lambda comm: int(comm.sum_integers(np.array([comm.rank]))[0]))
    [3, 3, 3]
    """
    size = integer("size", size, 1, MOST_THREADS)
    if not callable(function) or isinstance(function, type):
        raise UserError(f"function must be a function of a communicator: it is {kind_of(function)}")
    world = ThreadWorld(size, checked_timeout(timeout_s))
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            world.require_not_aborted()
            results[rank] = function(world.communicator(rank))
            end_rank_tasks(partial(world.leave, rank))  # its background tasks may communicate
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, UserError):
                error.add_note(f"raised on rank {rank} of {size}")
            errors.append(error)
            runtime.leave_process()
            world.abort()

    threads: list[runtime.Thread] = []
    try:
        try:
            for k in range(size):
                threads.append(runtime.Thread(partial(run, k), f"rank {k}", process=k))
                threads[-1].start()
        except (RuntimeError, MemoryError) as error:  # too many threads for the system
            world.abort()
            raise UserError(
                f"size={size} ranks need a thread each, but only {len(threads) - 1} could be "
                f"started: {line_of(error)}"
            ) from None
        for thread in threads:
            # bounded: threads whose own waits have timeout_s
            thread.join()
    except KeyboardInterrupt:
        world.abort()
        _end_interrupted(threads)
        raise KeyboardInterrupt from None  # without the frames of the wait
    causes = [e for e in errors if not isinstance(e, RankFailed)] or errors
    if causes:
        raise causes[0]
    return results


def _end_interrupted(threads: Sequence[runtime.Thread]) -> None:
    """End the ranks of an aborted world, and wait for their ends, a few seconds at most.

    A rank ends at its next collective, or else in the midst of its Python code.
    """
    if _ended(threads, COLLECTIVE_S):
        return
    started = [thread for thread in threads if thread.ident is not None]
    for thread in started:
        thread.interrupt()
    if not _ended(started, PYTHON_S):
        late = [rank for rank, thread in enumerate(started) if not thread.ended.is_set()]
        print(
            f"parallel_sgd: {in_words(late)} cannot be interrupted in the present call of a "
            "library, and will end after it",
            file=sys.stderr,
            flush=True,
        )


def _ended(threads: Sequence[runtime.Thread], seconds: float) -> bool:
    """Wait for the ends of threads. Return False if some are alive after these seconds."""
    until = runtime.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - runtime.monotonic()))
    return all(thread.ended.is_set() for thread in threads)
