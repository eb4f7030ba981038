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
        self._totals: SyncPerformance | None = None  # of this rank, for the run's report
        self._outside_s: dict[str, float] = {}  # by the name of the work outside training
        self._ended: dict[str, float] = {}  # the totals at the end of training
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
                ranks=group.own.size,
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
        every = self._performance, self._work, self._totals
        counts = [stats for stats in every if stats is not None]
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
        if self._work is None:
            self._work = self._added(group)

    def measure_totals(self, group: Group) -> None:
        """Add up this rank's time from now on, for `totals`. Called in the learner's thread.
        Local."""
        if self._totals is None:
            self._totals, self._outside_s = self._added(group), {}

    def _added(self, group: Group) -> SyncPerformance:
        """Return new statistics of all steps, added to the trace of the ranks."""
        world = self._world
        world.trace = group.own.trace = added = SyncPerformance(
            sys.maxsize, world.trace, rank=world.rank, ranks=group.own.size, at_once=True
        )
        return added

    def totals(self) -> dict[str, float]:
        """Return the seconds of this rank since `measure_totals`, by kind of work. Local.

        Kinds are "compute", "exchange" (with waits for remote ranks), "update", and the names of
        work outside training. Empty before `measure_totals`; fixed after `stop`.
        """
        return self._ended if self._totals is None else self._totals.seconds() | self._outside_s

    def work(self) -> tuple[int, float]:
        """Return this rank's samples since the last call, and the seconds of its work on them.
        Local."""
        return (0, 0.0) if self._work is None else self._work.work()

    @contextmanager
    def outside_training(self, name: str) -> Iterator[None]:
        """Record a `with` block under this name, and not as computing: for work between two steps,
        such as an evaluation. Local."""
        begin = runtime.perf_counter()
        with self._world.trace.span(name):
            yield
        self._computes_since = end = runtime.perf_counter()
        self._outside_s[name] = self._outside_s.get(name, 0.0) + end - begin

    def stop(self) -> None:
        """Print what the performance lines have missed, and stop them. Local."""
        if self._performance and (said := self._performance.missed()):
            print(said, flush=True)
        while (trace := self._world.trace) in (self._performance, self._work, self._totals):
            assert isinstance(trace, SyncPerformance)
            self._world.trace = trace.passed_on
        self._ended = self.totals()
        self._performance = self._work = self._totals = None
