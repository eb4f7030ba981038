"""Many runs, several at a time, and a file of those that have been carried out before."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.context import SpawnContext
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from parallel_sgd import UserError
from parallel_sgd.files import write_whole

from .training import FIRST_TUNING_SEED, Outcome, Run, train

SAVE_EVERY_S = 10
LOOK_EVERY_S = 5

T = TypeVar("T")
Line = Generator[Sequence[Run], Mapping[Run, Outcome], T]
"""Asks for runs, again and again, is sent their outcomes, and returns what it makes of them."""


class Runs:
    """Carries out what it has not carried out before.

    Args:
        jobs: how many at a time, each in a process of its own; 1: here.
        path: a file with the outcomes, read now and written on the way; None: none.
        minutes: from now; no run is begun that is not expected to have ended by then, going by the
            latest of the same task and ranks. None: as long as it takes.
    """

    def __init__(
        self, jobs: int = 1, path: str | None = None, minutes: float | None = None
    ) -> None:
        self.path = Path(path) if path else None
        self.outcomes: dict[Run, Outcome] = read(self.path) if self.path else {}
        self.done = 0
        self.core_seconds = 0.0  #: of all that were carried out
        self._begin = self._saved = time.monotonic()
        self._end = math.inf if minutes is None else self._begin + 60 * minutes
        self._seconds: dict[tuple[str, int], float] = {}  #: of the latest, by task and ranks
        self._dirty = False
        self._jobs, self._pool = jobs, Here() if jobs == 1 else process_pool(jobs)

    def __enter__(self) -> Runs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        self._save()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._begin

    def follow(self, lines: Sequence[Line[T]]) -> list[T | None]:
        """What each line returns; None where the time has not sufficed, or a run has failed.

        No line waits for another, and the runs of earlier ones are begun first. A failure, which
        divergence is none, is printed, and ends the lines that need that run.
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
                    under_way[self._pool.submit(train, run)] = run, now
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
        """Those that have no outcome yet, and may end in time."""
        for run in runs:
            expected = self._seconds.get((run.task, run.ranks), 0.0)
            if run not in self.outcomes and time.monotonic() + expected < self._end:
                yield run

    def _add(self, run: Run, begun: float, outcome: Outcome) -> None:
        self.outcomes[run], self._dirty = outcome, True
        seconds = time.monotonic() - begun
        self._seconds[run.task, run.ranks] = seconds
        self.core_seconds += seconds
        self.done += 1

    def _save_now_and_then(self) -> None:
        if self._dirty and time.monotonic() - self._saved > SAVE_EVERY_S:
            print(f"{self.done} runs in {self.seconds:.0f} s", file=sys.stderr)
            self._save()

    def _save(self) -> None:
        self._saved, self._dirty = time.monotonic(), False
        if self.path and self.outcomes:
            text = _text(self.outcomes)
            write_whole("--runs", self.path, lambda aside: aside.write_text(text))


class Here(Executor):
    """Carries out at once, in this process, what it is given."""

    def submit(self, function: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(function(*args, **options))
        except Exception as error:
            future.set_exception(error)
        return future


def read(path: Path) -> dict[Run, Outcome]:
    """The outcomes in a file; none if it does not exist.

    Raises:
        UserError: it is not such a file.
    """
    if not path.exists():
        return {}
    outcomes = {}
    try:
        for group in json.loads(path.read_text()):
            sent = group.pop("bytes_sent")  # of all seeds alike, or by seed
            options = tuple((name, value) for name, value in group.pop("options").items())
            errors = group.pop("errors", {})
            for seed, losses in group.pop("losses").items():
                outcomes[Run(**group, options=options, seed=int(seed))] = Outcome(
                    tuple(losses),
                    sent[seed] if isinstance(sent, dict) else sent,
                    tuple(errors.get(seed, ())),
                )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: these are not the runs of this benchmark: {error}") from None
    return outcomes


def _text(outcomes: dict[Run, Outcome]) -> str:
    """A line of JSON for all seeds of the same settings."""
    groups: dict[Run, dict[str, Any]] = {}
    for run, outcome in sorted(outcomes.items(), key=_order):
        fields = asdict(run)
        del fields["seed"]
        fields["options"] = dict(run.options)
        group = groups.setdefault(replace(run, seed=0), {**fields, "bytes_sent": {}, "losses": {}})
        group["bytes_sent"][run.seed] = outcome.bytes_sent
        points = slice(-1 if run.seed >= FIRST_TUNING_SEED else 0, None)
        group["losses"][run.seed] = outcome.losses[points]
        if outcome.errors:
            group.setdefault("errors", {})[run.seed] = outcome.errors[points]
    for group in groups.values():
        if len(counts := {*group["bytes_sent"].values()}) == 1:
            group["bytes_sent"] = counts.pop()
    return "[\n" + ",\n".join(map(json.dumps, groups.values())) + "\n]\n"


def _order(item: tuple[Run, Outcome]) -> Any:
    run = item[0]
    parts = run.task, run.contender, run.optimizer, run.ranks, run.samples, run.options
    return *parts, run.lr, run.seed


def process_pool(jobs: int) -> ProcessPoolExecutor:
    """Processes with a core each, as far as there are cores; they end with this one."""
    context: SpawnContext = multiprocessing.get_context("spawn")
    for library in ("OPENBLAS", "OMP"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    numbers = context.Queue()
    for number in range(jobs):
        numbers.put(number)
    return ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(numbers,))


def _begin(numbers: Any) -> None:
    """Keep this process on one core: the threads of a run then wait less for each other. It ends
    with the one that began it, also where that is killed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(AttributeError, OSError):  # where the system does not offer it
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[numbers.get() % len(cores)]})


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)
