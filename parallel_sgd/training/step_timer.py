"""The step timer: times a learner's computing and steps, for the trace and performance lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .. import runtime
from ..communication import Communicator, Group
from ..trace import NO_TRACE
from .sync_stats import SyncPerformance


class StepTimer:
    """Times the steps of a learner, and the program's computing between two steps.

    Args:
        world: all ranks; spans go to its trace.
        bytes_sent: returns the bytes sent by this rank so far.
    """

    def __init__(self, world: Communicator, bytes_sent: Callable[[], int]) -> None:
        self._world, self._bytes_sent = world, bytes_sent
        self._performance: SyncPerformance | None = None
        self._work: SyncPerformance | None = None  # of this rank, for its share
        self._computes_since: float | None = None  # start of the program's computing

    def watch(self, every: int, group: Group, *, asynchronous: bool) -> None:
        """Print performance lines on the first rank that trains. After a rank failure this may be
        another rank than before. Local.

        Args:
            every: exchanges of all ranks between two lines; 0: no lines.
            group: the ranks, with their roles.
            asynchronous: the algorithm is asynchronous.
        """
        world = self._world
        if every and world.rank == group.workers[0] and self._performance is None:
            world.trace = group.own.trace = self._performance = SyncPerformance(
                every,
                world.trace,
                rank=world.world_ranks[world.rank],
                ranks=len(group.workers),
                asynchronous=asynchronous,
            )

    def step(self, take: Callable[[int, bool], int], samples: int, skip: bool) -> int:
        """Call `take` with the arguments for a step, and time the step. Return the samples of all
        ranks. Collective."""
        trace = self._world.trace
        if trace is NO_TRACE:
            self._computes_since = None
            return take(samples, skip)
        if self._computes_since is not None:
            trace.record("compute", self._computes_since, runtime.perf_counter())
        counts = [stats for stats in (self._performance, self._work) if stats is not None]
        for stats in counts:
            stats.begin_step()
        with trace.span("step"):
            total = take(samples, skip)
        for stats in counts:
            if line := stats.stepped(samples, total, self._bytes_sent):
                print(line, flush=True)
        self._computes_since = runtime.perf_counter()
        return total

    def measure_work(self, group: Group) -> None:
        """Measure this rank's work from now on, for `work`. Called in the learner's thread after
        every step. Local."""
        if self._work is not None:
            return
        world = self._world
        self._work = world.trace = group.own.trace = SyncPerformance(
            sys.maxsize, world.trace, rank=world.rank, ranks=len(group.workers), at_once=True
        )

    def work(self) -> tuple[int, float]:
        """Return this rank's samples since the last call, and the seconds of its work on them.
        Local."""
        return (0, 0.0) if self._work is None else self._work.work()

    @contextmanager
    def outside_training(self, name: str) -> Iterator[None]:
        """Record a `with` block under this name, and not as computing: for work between two steps,
        such as an evaluation. Local."""
        with self._world.trace.span(name):
            yield
        self._computes_since = runtime.perf_counter()

    def stop(self) -> None:
        """Print what the performance lines have missed, and stop them. Local."""
        if self._performance and (said := self._performance.missed()):
            print(said, flush=True)
        while (trace := self._world.trace) in (self._performance, self._work):
            assert isinstance(trace, SyncPerformance)
            self._world.trace = trace.passed_on
        self._performance = self._work = None
