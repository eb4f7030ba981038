"""Runs of many contenders and seeds, several at a time; and the search for a rate."""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar

SAVE_EVERY_S = 10

Run = TypeVar("Run", bound=Hashable)
Outcome = TypeVar("Outcome")
Case = TypeVar("Case")
T = TypeVar("T")


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

    def next_points(self) -> list[int]:
        """Return the places to score next, the best one first; empty at the end."""
        near = (self.best, self.best + 1, self.best - 1)
        on_grid = (i for i in near if self.count is None or 0 <= i < self.count)
        return [i for i in on_grid if i not in self.scores]


class MissingRun(Exception):
    """A run failed, or the time was too short for the run."""


class Runs(Generic[Run, Outcome]):
    """Runs, each carried out once for all that ask for the run. A `with` block.

    Args:
        train: carries a run out.
        jobs: how many at a time, each in a process; 1: in this process.
        minutes: from now; a run begins only if its kind's latest run would end in time. None: no
            limit.
        known: outcomes of earlier runs.
        kind: a key of runs with about the same duration.
        save: called with all outcomes now and then, and at the end.
    """

    def __init__(
        self,
        train: Callable[[Run], Outcome],
        *,
        jobs: int = 1,
        minutes: float | None = None,
        known: Mapping[Run, Outcome] | None = None,
        kind: Callable[[Run], Hashable] = lambda run: None,
        save: Callable[[Mapping[Run, Outcome]], None] = lambda outcomes: None,
    ) -> None:
        self.outcomes = dict(known or {})
        self.done = 0  #: runs
        self._train, self._kind, self._save, self._jobs = train, kind, save, jobs
        self._begin = self._saved = time.monotonic()
        self._end = math.inf if minutes is None else self._begin + 60 * minutes
        self._seconds: dict[Hashable, float] = {}  #: of the latest run of each kind
        self._begun: dict[Run, Future[None]] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(jobs)
        self._processes = process_pool(jobs) if jobs > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        if self._processes:
            self._processes.shutdown()
        if self.done:
            self._save(self.outcomes)

    def map(self, result_of: Callable[[Case], T], cases: Sequence[Case]) -> list[T | None]:
        """Call a function, which calls `outcomes_of`, with each case.

        As many cases as jobs are under way at a time, the first ones first.

        Returns:
            The results in order; None for cases with a missing run.
        """

        def result(case: Case) -> T | None:
            with suppress(MissingRun):
                return result_of(case)
            return None

        with ThreadPoolExecutor(self._jobs) as threads:
            try:
                return list(threads.map(result, cases))
            except BaseException:
                self._end = -math.inf  # no more runs begin
                raise

    def outcomes_of(self, runs: Sequence[Run]) -> list[Outcome]:
        """Return the outcomes of some runs, in order. Waits for the runs.

        Raises:
            MissingRun: no outcome of a run; the run's error has been printed.
        """
        with self._lock:
            for run in runs:
                if run not in self.outcomes and run not in self._begun:
                    self._begun[run] = self._threads.submit(self._carry_out, run)
        for run in runs:
            if run in self._begun:
                self._begun[run].result()
        return [self.outcomes[run] for run in runs]

    def search(
        self,
        start: int,
        count: int,
        runs_at: Callable[[int], list[Run]],
        loss_of: Callable[[Outcome], float],
    ) -> Search:
        """Search for the place whose runs have the least mean loss.

        Raises:
            MissingRun: as `outcomes_of`.
        """
        search = Search(start, count)
        while points := search.next_points():
            self.outcomes_of([run for i in points for run in runs_at(i)])
            for i in points:
                losses = map(loss_of, self.outcomes_of(runs_at(i)))
                search.scores[i] = statistics.fmean(losses)
        return search

    def _carry_out(self, run: Run) -> None:
        begin, kind = time.monotonic(), self._kind(run)
        if begin + self._seconds.get(kind, 0.0) >= self._end:
            raise MissingRun
        try:
            if self._processes:
                outcome = self._processes.submit(self._train, run).result()
            else:
                outcome = self._train(run)
        except Exception as error:
            print("".join(traceback.format_exception(error)), run, file=sys.stderr)
            raise MissingRun from error
        with self._lock:
            now = time.monotonic()
            self.outcomes[run], self._seconds[kind] = outcome, now - begin
            self.done += 1
            if now - self._saved > SAVE_EVERY_S:
                print(f"{self.done} runs in {now - self._begin:.0f} s", file=sys.stderr)
                self._save(self.outcomes)
                self._saved = now


def process_pool(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of processes with a core each, if possible; all end with this process."""
    for library in ("OPENBLAS", "OMP"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin)


def _begin() -> None:
    """Keep this process on one core: the threads of a run then wait less for each other.

    The process ends with its parent, even if the parent is killed.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    number = int(multiprocessing.current_process().name.rpartition("-")[2])
    with suppress(AttributeError, OSError):  # where the system does not offer it
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)
