"""Operations on a learner of ranks that fail and join, drawn by hypothesis."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from failure_history import TRAINED, Fail, FailingJob, Save, Train, check_ends
from histories import run, run_machine
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

SEEDS = st.integers(0, 999)
FAILS = st.none() | st.tuples(st.integers(0, 5), st.integers(1, 150))
SIZES = st.lists(st.integers(1, 8), min_size=1, max_size=6)
BUDGET = 60, 10  #: histories, and most operations in each


class FailureHistory(RuleBasedStateMachine):
    """Draws operations and failures. The ranks run them at the end, and then other ranks resume the
    newest checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []
        self.failing: set[int] = set()

    @initialize(
        trained=st.integers(0, len(TRAINED) - 1),
        ranks=st.integers(2, 4),
        spares=st.integers(0, 2),
        commit_every=st.integers(1, 4),
        seed=SEEDS,
        resumes_on=st.integers(1, 4),
    )
    def begin(self, trained, ranks, spares, commit_every, seed, resumes_on):
        self.trained, self.commit_every = TRAINED[trained], commit_every
        self.ranks, self.spares, self.seed, self.resumes_on = ranks, spares, seed, resumes_on

    @rule(sizes=SIZES, looks=st.booleans(), fails=FAILS)
    def train(self, sizes, looks, fails):
        self._fail(fails)
        self.operations.append(Train(tuple(sizes), looks))

    @rule(kind=st.sampled_from(["look", "load", "finish"]), fails=FAILS)
    def do(self, kind, fails):
        self._fail(fails)
        self.operations.append(kind)

    @rule(background=st.booleans(), fails=FAILS)
    def save(self, background, fails):
        self._fail(fails)
        self.operations.append(Save(background))

    def _fail(self, fails) -> None:
        """Let a rank fail soon, in this operation or a later one, if another rank remains."""
        if fails is None or len(self.failing) == self.ranks - 1:
            return
        rank, points = fails[0] % (self.ranks + self.spares), fails[1]
        if rank not in self.failing:
            self.failing.add(rank)
            self.operations.append(Fail(rank, points))

    def teardown(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="history-"))
        operations = [*self.operations, "finish"]
        job = FailingJob(self.trained, self.commit_every, folder / "checkpoints", operations)
        try:
            ends, schedule = run(self.ranks, job, self.seed, spares=self.spares)
            check_ends(ends, schedule.failed, job)
            # The threads of a failed rank leave a lock behind.
            without = shutil.ignore_patterns(".lock")
            if job.folder.exists():
                shutil.copytree(job.folder, folder / "copied", ignore=without)
            job.folder = folder / "copied"
            clocks, _ = run(self.resumes_on, job.resume, self.seed)
            assert set(clocks) <= {0, *job.saved}
        finally:
            shutil.rmtree(folder)


@pytest.mark.filterwarnings("ignore")
def test_operations_on_ranks_that_fail_and_join() -> None:
    run_machine(FailureHistory, *BUDGET)
