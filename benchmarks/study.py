"""Studies: runs of many contenders and seeds, several at a time; and the search for a rate."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from multiprocessing.context import SpawnContext
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np

SAVE_EVERY_S = 10
LOOK_EVERY_S = 5

Run = TypeVar("Run", bound=Hashable)
Outcome = TypeVar("Outcome")
T = TypeVar("T")
Line = Generator[Sequence[Run], Mapping[Run, Outcome], T]
"""A line of a table in the making: yields the runs it needs next, receives their outcomes, and
returns its result."""


class Search:
    """The search for the least score on a grid: ends when both neighbours of the best are worse.

    Equal scores count as better to the left, so the search leaves high rates with diverging runs.

    Args:
        start: the place to begin at.
        count: of places, 0 to count - 1; None: no ends.
    """

    def __init__(self, start: int, count: int | None = None) -> None:
        self.start, self.count = start, count
        self.scores: dict[int, Any] = {}

    @property
    def best(self) -> int:
        return min(sorted(self.scores), key=self.scores.__getitem__, default=self.start)

    @property
    def score(self) -> Any:
        return self.scores[self.best]

    def next_points(self) -> list[int]:
        """Return the places to score next, the best one first; empty at the end."""
        near = (self.best, self.best + 1, self.best - 1)
        on_grid = (i for i in near if self.count is None or 0 <= i < self.count)
        return [i for i in on_grid if i not in self.scores]

    def line(
        self, runs_at: Callable[[int], list[Run]], score: Callable[[Outcome], float]
    ) -> Line[Run, Outcome, int]:
        """Search by the mean score of the runs at each place. Returns the best place."""
        while points := self.next_points():
            by_point = {i: runs_at(i) for i in points}
            outcomes = yield [run for runs in by_point.values() for run in runs]
            for i, runs in by_point.items():
                self.scores[i] = float(np.mean([score(outcomes[run]) for run in runs]))
        return self.best


class Runs(Generic[Run, Outcome]):
    """Runs, each carried out once for all lines that need the run. A `with` block.

    Args:
        train: carries a run out.
        jobs: how many at a time, each in a process; 1: in this process.
        minutes: from now; a run begins only if its kind's latest run would end in time. None: no
            limit.
        known: outcomes of earlier runs.
    """

    def __init__(
        self,
        train: Callable[[Run], Outcome],
        *,
        jobs: int = 1,
        minutes: float | None = None,
        known: Mapping[Run, Outcome] | None = None,
    ) -> None:
        self.outcomes = dict(known or {})
        self.done = 0
        self.core_seconds = 0.0  #: of all runs that were carried out
        self._train = train
        self._begin = self._saved = time.monotonic()
        self._end = math.inf if minutes is None else self._begin + 60 * minutes
        self._seconds: dict[Hashable, float] = {}  #: of the latest run of each kind
        self._dirty = False
        self._jobs, self._pool = jobs, Here() if jobs == 1 else process_pool(jobs)

    def kind(self, run: Run) -> Hashable:
        """Return a key of runs with about the same duration."""
        return None

    def save(self) -> None:
        """Write all outcomes: called now and then, and at the end. Here nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        self._save()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begin

    def follow(self, lines: Sequence[Line[Run, Outcome, T]]) -> list[T | None]:
        """Return each line's result; None if the time was too short, or a run raised an error.

        Lines do not wait for each other; the runs of earlier lines begin first. An error is
        printed, and ends all lines with that run. Divergence is no error.
        """
        results: list[T | None] = [None] * len(lines)
        wanted = {number: next(line) for number, line in enumerate(lines)}
        under_way: dict[Future[Outcome], tuple[Run, float]] = {}
        while True:
            for number in list(wanted):
                while all(run in self.outcomes for run in wanted[number]):
                    outcomes = {run: self.outcomes[run] for run in wanted[number]}
                    try:
                        wanted[number] = lines[number].send(outcomes)
                    except StopIteration as end:
                        results[number] = end.value
                        del wanted[number]
                        break
            begun = {run for run, _ in under_way.values()}
            for run in self._possible(run for runs in wanted.values() for run in runs):
                if len(under_way) == self._jobs:
                    break
                if run not in begun:
                    begun.add(run)
                    now = time.monotonic()
                    under_way[self._pool.submit(self._train, run)] = run, now
            if not under_way:
                return results
            ended, _ = wait(under_way, LOOK_EVERY_S, FIRST_COMPLETED)
            for future in ended:
                run, since = under_way.pop(future)
                if error := future.exception():
                    print("".join(traceback.format_exception(error)), run, file=sys.stderr)
                    wanted = {number: runs for number, runs in wanted.items() if run not in runs}
                else:
                    self._add(run, since, future.result())
            self._save_now_and_then()

    def _possible(self, runs: Iterable[Run]) -> Iterator[Run]:
        """Yield the runs without an outcome that may end in time."""
        for run in runs:
            expected = self._seconds.get(self.kind(run), 0.0)
            if run not in self.outcomes and time.monotonic() + expected < self._end:
                yield run

    def _add(self, run: Run, begun: float, outcome: Outcome) -> None:
        self.outcomes[run], self._dirty = outcome, True
        seconds = time.monotonic() - begun
        self._seconds[self.kind(run)] = seconds
        self.core_seconds += seconds
        self.done += 1

    def _save_now_and_then(self) -> None:
        if self._dirty and time.monotonic() - self._saved > SAVE_EVERY_S:
            print(f"{self.done} runs in {self.seconds:.0f} s", file=sys.stderr)
            self._save()

    def _save(self) -> None:
        self._saved, self._dirty = time.monotonic(), False
        if self.outcomes:
            self.save()


class Here(Executor):
    """An executor that calls each function at once, in this process."""

    def submit(self, function: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(function(*args, **options))
        except Exception as error:
            future.set_exception(error)
        return future


def process_pool(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of processes with a core each, if possible; all end with this process."""
    context: SpawnContext = multiprocessing.get_context("spawn")
    for library in ("OPENBLAS", "OMP"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    numbers = context.Queue()
    for number in range(jobs):
        numbers.put(number)
    return ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(numbers,))


def _begin(numbers: Any) -> None:
    """Keep this process on one core: the threads of a run then wait less for each other.

    The process ends with its parent, even if the parent is killed.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(AttributeError, OSError):  # where the system does not offer it
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[numbers.get() % len(cores)]})


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)
