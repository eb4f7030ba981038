"""Operations on workers and parameter servers, drawn by hypothesis."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from histories import run, run_machine
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from served_history import MOST_WORKERS, SERVED, Fail, Save, ServedJob, Train, check_folder

from parallel_sgd.training.checkpoint.files import checkpoints_in, sort_key

SEEDS = st.integers(0, 999)
WORKERS, SERVERS = st.integers(1, MOST_WORKERS), st.integers(0, 2)
STEPS = st.lists(st.tuples(*[st.integers(0, 3)] * MOST_WORKERS), max_size=5)
LOADS = st.none() | st.integers(0, 3)
BUDGET = 40, 8  #: histories, and most operations in each


class ServedHistory(RuleBasedStateMachine):
    """Draws jobs with their operations. The ranks run them at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="history-"))
        self.jobs: list[ServedJob] = []

    def _begin(self, options, workers, servers, seed, load=None) -> None:
        job = ServedJob(options, workers, servers, seed, self.folder / "checkpoints", load)
        self.jobs.append(job)

    def _add(self, operation) -> None:
        self.jobs[-1].operations.append(operation)

    @initialize(
        options=st.integers(0, len(SERVED) - 1), workers=WORKERS, servers=SERVERS, seed=SEEDS
    )
    def begin(self, options, workers, servers, seed):
        self._begin(SERVED[options], workers, servers, seed)

    @rule(steps=STEPS)
    def train(self, steps):
        self._add(Train(tuple(steps)))

    @rule()
    def look(self):
        self._add("look")

    @rule(background=st.booleans())
    def save(self, background):
        self._add(Save(background))

    @rule(
        before=STEPS,
        saves=st.booleans(),
        workers=WORKERS,
        servers=SERVERS,
        seed=SEEDS,
        load=LOADS,
        after=STEPS,
    )
    def begin_again(self, before, saves, workers, servers, seed, load, after):
        """Another job, which may load what is there."""
        self._add(Train(tuple(before)))
        if saves:
            self._add(Save(background=False))
        self._begin(self.jobs[-1].options, workers, servers, seed, load)
        self._add(Train(tuple(after)))

    @rule(worker=st.integers(0, MOST_WORKERS - 1), seed=SEEDS, load=LOADS)
    def fail_and_begin_again(self, worker, seed, load):
        job = self.jobs[-1]
        self._add(Fail(worker % job.workers))
        self._begin(job.options, job.workers, job.servers, seed, load)

    def teardown(self) -> None:
        saved: dict[int, np.ndarray] = {}
        try:
            for job in self.jobs:
                found = checkpoints_in(job.folder)
                if job.load is not None and found:
                    job.path = found[-1 - job.load % len(found)]
                    job.begins = saved[sort_key(job.path.name)[0]]
                ends, _ = run(job.ranks, job, job.seed)
                saved |= job.check(ends)
                check_folder(job.folder, saved)
        finally:
            shutil.rmtree(self.folder)


@pytest.mark.filterwarnings("ignore")
def test_operations_on_workers_and_servers() -> None:
    run_machine(ServedHistory, *BUDGET)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("options", [{"sync_steps": 3}, {"sync_steps": 2, "currency": "deltas"}])
def test_what_is_not_yet_pushed_is_pushed_by_other_workers(options, workers) -> None:
    """One of four workers has a sample."""
    history = ServedHistory()
    history.begin(SERVED.index(options), 4, 1, seed=0)
    history.begin_again([(0, 0, 0, 1)], True, workers, 1, 0, 0, [])
    history.teardown()
