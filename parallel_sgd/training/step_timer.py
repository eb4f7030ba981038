"""The step timer: times a learner's computing and steps, for the trace and performance lines."""

from __future__ import annotations

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
        trace, stats = self._world.trace, self._performance
        if stats is None and trace is NO_TRACE:
            self._computes_since = None
            return take(samples, skip)
        if self._computes_since is not None:
            trace.record("compute", self._computes_since, runtime.perf_counter())
        if stats:
            stats.begin_step()
        with trace.span("step"):
            total = take(samples, skip)
        if stats and (line := stats.stepped(samples, total, self._bytes_sent)):
            print(line, flush=True)
        self._computes_since = runtime.perf_counter()
        return total

    @contextmanager
    def outside_training(self, name: str) -> Iterator[None]:
        """Record a `with` block under this name, and not as computing: for work between two steps,
        such as an evaluation. Local."""
        with self._world.trace.span(name):
            yield
        self._computes_since = runtime.perf_counter()

    def stop(self) -> None:
        """Print what the performance lines have missed, and stop them. Local."""
        if self._performance:
            if said := self._performance.missed():
                print(said, flush=True)
            self._world.trace, self._performance = self._performance.passed_on, None
