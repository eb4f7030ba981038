"""Many runs, several at a time, and a file of those that have been carried out before."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.context import SpawnContext
from pathlib import Path
from types import TracebackType
from typing import Any

from parallel_sgd import UserError
from parallel_sgd.files import write_whole

from .training import FIRST_TUNING_SEED, Outcome, Run, train

SAVE_EVERY_S = 20


class Runs:
    """Carries out what it has not carried out before.

    Args:
        jobs: how many at a time, each in a process of its own; 1: here.
        path: a file with the outcomes, read now and written on the way; None: none.
    """

    def __init__(self, jobs: int = 1, path: str | None = None) -> None:
        self.path = Path(path) if path else None
        self.outcomes: dict[Run, Outcome] = read(self.path) if self.path else {}
        self.done = 0
        self._begin = self._saved = time.monotonic()
        self._pool = None if jobs == 1 else _pool(jobs)

    def __enter__(self) -> Runs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=kind is not None)
        self._save()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._begin

    def __call__(self, wanted: Iterable[Run]) -> dict[Run, Outcome]:
        """The outcomes of some runs."""
        runs = list(dict.fromkeys(wanted))
        missing = [run for run in runs if run not in self.outcomes]
        missing.sort(key=lambda run: (run.task, run.ranks), reverse=True)  # the longest ones first
        if self._pool is None:
            for run in missing:
                self._add(run, train(run))
        else:
            futures = {self._pool.submit(train, run): run for run in missing}
            for future in as_completed(futures):
                self._add(futures[future], future.result())
        return {run: self.outcomes[run] for run in runs}

    def _add(self, run: Run, outcome: Outcome) -> None:
        self.outcomes[run] = outcome
        self.done += 1
        if time.monotonic() - self._saved > SAVE_EVERY_S:
            print(f"{self.done} runs in {self.seconds:.0f} s", file=sys.stderr)
            self._save()

    def _save(self) -> None:
        self._saved = time.monotonic()
        if self.path and self.outcomes:
            text = _text(self.outcomes)
            write_whole("--runs", self.path, lambda aside: aside.write_text(text))


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
            sent = group.pop("bytes_sent")
            options = tuple((name, value) for name, value in group.pop("options").items())
            for seed, losses in group.pop("losses").items():
                outcomes[Run(**group, options=options, seed=int(seed))] = Outcome(
                    tuple(losses), sent
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
        group = groups.setdefault(replace(run, seed=0), {**fields, "bytes_sent": 0, "losses": {}})
        group["bytes_sent"] = max(group["bytes_sent"], outcome.bytes_sent)  # 0 where one broke off
        tuning = run.seed >= FIRST_TUNING_SEED
        group["losses"][run.seed] = outcome.losses[-1:] if tuning else outcome.losses
    return "[\n" + ",\n".join(map(json.dumps, groups.values())) + "\n]\n"


def _order(item: tuple[Run, Outcome]) -> Any:
    run = item[0]
    return run.task, run.contender, run.ranks, run.samples, run.options, run.lr, run.seed


def _pool(jobs: int) -> ProcessPoolExecutor:
    context: SpawnContext = multiprocessing.get_context("spawn")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    numbers = context.Queue()
    for number in range(jobs):
        numbers.put(number)
    return ProcessPoolExecutor(jobs, context, initializer=_bind, initargs=(numbers,))


def _bind(numbers: Any) -> None:
    """Keep this process on one core: the threads of a run then wait less for each other."""
    with suppress(AttributeError, OSError):  # where the system does not offer it
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[numbers.get() % len(cores)]})
