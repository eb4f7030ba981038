"""A world of threads in one process: the same collectives, for tests and for simulation."""

from __future__ import annotations

import copy
import platform
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ..validation import integer
from .communicator import TIMEOUT_S, Array, Closed, Communicator, Counts, checked_timeout
from .endpoint import Endpoint
from .messages import Messages
from .thread_endpoint import Mail, RankFailed, ThreadEndpoint
from .thread_messages import ThreadMessages

Result = TypeVar("Result")


class ThreadWorld:
    """What the ranks of one process share: a barrier, and a place for each rank's argument."""

    def __init__(self, size: int, timeout_s: float = TIMEOUT_S) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.offers: list[Any] = [None] * size
        self.mail = Mail()
        self._parts: dict[tuple[int, int], ThreadWorld] = {}
        self._left = 0  # ranks that have closed their communicator
        self._lock = threading.Lock()

    def communicator(self, rank: int) -> Communicator:
        return ThreadCommunicator(self, rank)

    def part(self, number: int, group: int, size: int) -> ThreadWorld:
        """The world of one group that the ranks get at their so many-th parting, from 0."""
        with self._lock:
            if (number, group) not in self._parts:
                part = self._parts[number, group] = ThreadWorld(size, self.timeout_s)
                if self.barrier.broken:
                    part.abort()
            return self._parts[number, group]

    def leave(self) -> bool:
        """A rank has closed its communicator; whether it was the last one."""
        with self._lock:
            self._left += 1
            return self._left == self.size

    def forget(self, number: int, group: int) -> None:
        """All ranks have left a part."""
        with self._lock:
            del self._parts[number, group]

    def abort(self) -> None:
        """Let every rank that waits, here or in a part of this world, fail."""
        self.barrier.abort()
        self.mail.abort()
        with self._lock:
            parts = list(self._parts.values())
        for world in parts:
            world.abort()


class ThreadCommunicator(Communicator):
    """One thread's view of a `ThreadWorld`."""

    def __init__(
        self, world: ThreadWorld, rank: int, forget: Callable[[], None] = lambda: None
    ) -> None:
        """
        Args:
            forget: called when the last rank has closed its communicator.
        """
        self._world, self.rank, self.size = world, rank, world.size
        self._partings, self._forget = 0, forget

    def allgather(self, send: Array, receive: Array, counts: Counts) -> None:
        def take(offers: list[Array]) -> None:
            ends = np.cumsum(counts)
            for part, begin, end in zip(offers, ends - counts, ends, strict=True):
                receive[begin:end] = part

        self._share("allgather", send, take)

    def alltoall(
        self,
        send: Array,
        send_counts: Counts,
        receive: Array,
        receive_counts: Counts,
        *,
        most: int | None = None,
    ) -> None:
        def take(offers: list[tuple[Array, Counts]]) -> None:
            at = 0
            for (theirs, counts), n in zip(offers, receive_counts, strict=True):
                begin = sum(counts[: self.rank])
                receive[at : at + n] = theirs[begin : begin + n]
                at += n

        self._share("alltoall", (send, send_counts), take)

    def broadcast(self, array: Array, root: int = 0) -> None:
        def take(offers: list[Array]) -> None:
            if self.rank != root:
                array[...] = offers[root]

        self._share("broadcast", array, take)

    def sum_integers(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        total: npt.NDArray[np.int64] = self._share("sum_integers", values, np.sum, axis=0)
        return total

    def allgather_object(self, item: Any) -> list[Any]:
        items: list[Any] = self._share("allgather_object", item, copy.deepcopy)
        return items

    def duplicate(self) -> Communicator:
        return self._part(0, self.size, self.rank)

    def split(self, group: int) -> Communicator:
        groups = self.allgather_object(group)
        return self._part(group, groups.count(group), groups[: self.rank].count(group))

    def _part(self, group: int, size: int, rank: int) -> Communicator:
        key = self._partings, group
        world = self._world.part(*key, size)
        self._partings += 1
        made = ThreadCommunicator(world, rank, partial(self._world.forget, *key))
        made.trace = self.trace
        return made

    def close(self) -> None:
        world, self._world = self._world, cast(ThreadWorld, Closed())
        if isinstance(world, ThreadWorld) and world.leave():
            self._forget()

    def endpoint(self, peers: Sequence[int], *, serving: bool) -> Endpoint:
        return ThreadEndpoint(self._world.mail, self.rank, peers, serving, self.timeout_s)

    def messages(self) -> Messages:
        return ThreadMessages(self._world.mail, self.rank, self.timeout_s)

    @property
    def timeout_s(self) -> float:
        return self._world.timeout_s

    @property
    def host(self) -> str:
        return platform.node()

    def _share(self, name: str, item: Any, take: Callable[..., Any], **options: Any) -> Any:
        """Offer `item`, and when all ranks have, `take` from the list of offers."""
        world = self._world
        if world.size == 1:
            return take([item], **options)
        world.offers[self.rank] = (name, item)
        try:
            world.barrier.wait()
            called = [called for called, _ in world.offers]
            assert set(called) == {name}, f"ranks called different collectives: {called}"
            result = take([theirs for _, theirs in world.offers], **options)
            world.barrier.wait()
        except threading.BrokenBarrierError:
            raise RankFailed(f"rank {self.rank} waited in {name} for a rank that failed") from None
        except BaseException:
            world.abort()
            raise
        return result


def simulate(
    size: int, function: Callable[[Communicator], Result], timeout_s: float = TIMEOUT_S
) -> list[Result]:
    """Run `function(comm)` on `size` logical ranks, a thread each, and return all results.

    Args:
        size: at least 1.
        timeout_s: longest wait of a rank for the others.
    Raises:
        UserError: a size or time that is not possible.
        whatever the first rank to fail raised; the others are stopped at their next collective.

    >>> simulate(3, lambda comm: int(comm.sum_integers(np.array([comm.rank]))[0]))
    [3, 3, 3]
    """
    size = integer("size", size, 1)
    world = ThreadWorld(size, checked_timeout(timeout_s))
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(world.communicator(rank))
        except BaseException as error:
            errors.append(error)
            world.abort()

    threads = [
        threading.Thread(target=run, args=(k,), name=f"rank {k}", daemon=True) for k in range(size)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        world.abort()
        raise
    causes = [e for e in errors if not isinstance(e, RankFailed)] or errors
    if causes:
        raise causes[0]
    return results
