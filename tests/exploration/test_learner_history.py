"""Operations on a learner in any order, drawn by hypothesis."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from histories import Step, run, run_machine
from history_checks import Expectations, check_folder, check_job
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from learner_history import (
    FAMILIES,
    OPTIMIZERS,
    Fail,
    Job,
    Lineage,
    Load,
    Look,
    Ranks,
    Save,
    Saved,
    Setting,
)

SEEDS, PLACES = st.integers(0, 999), st.integers(0, 3)
COUNTS = st.tuples(*[st.integers(0, 3)] * 4)
STEPS = st.lists(st.tuples(COUNTS, st.integers(0, 2)), max_size=4)
BOOLEANS = st.booleans()
MOST_SKIPPED = 5  #: of a history: a learner ends after ten in a row
BUDGET = 40, 8  #: histories, and most operations in each


class LearnerHistory(RuleBasedStateMachine):
    """Draws jobs with their operations, and the lineage of the state after each. The ranks run them
    at the end, so that hypothesis can repeat and shorten a history."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Job] = []
        self.saved: dict[int, Saved] = {}  # by samples: a newer one replaces an older one
        self.references = self.skipped = self.saves = 0
        self.loaded = False  # in the present job

    @property
    def job(self) -> Job:
        return self.jobs[-1]

    def _begin(self, setting: Setting, ranks: int, seed: int, **given: bool) -> None:
        lineage = Lineage(ranks, replace(setting, not_finite="skip"))
        self.jobs.append(Job(ranks, setting, seed, lineages=[lineage], **given))
        self.loaded = False

    def _add(self, operation, lineage=None) -> None:
        lineage = lineage or self.job.lineage
        self.job.operations.append(operation)
        self.job.lineages.append(lineage)

    @initialize(
        family=st.sampled_from([*FAMILIES]),
        variant=st.integers(0, 10),
        ranks=st.sampled_from([2, 3, 4, 3, 2, 1]),
        seed=SEEDS,
        optimizer=st.sampled_from([*OPTIMIZERS]),
        rate=st.integers(0, 1),
        skips=BOOLEANS,
        announced=BOOLEANS,
    )
    def begin(self, family, variant, ranks, seed, optimizer, rate, skips, announced):
        variant, not_finite = variant % len(FAMILIES[family]), "skip" if skips else "stop"
        setting = Setting(family, variant, optimizer, rate, not_finite)
        self._begin(setting, ranks, seed, announced=announced)

    @rule(steps=STEPS)
    def train(self, steps):
        self._train(steps)

    def _train(self, steps) -> None:
        for counts, data in steps:
            step = Step(counts[: self.job.ranks], data)
            self._add(step, self.job.lineage + step)

    @property
    def may_skip(self) -> bool:
        """A block with a loaded checkpoint has no copy of the optimizer's state at its beginning,
        so its steps alone do not give its state after a skip."""
        setting = self.job.setting
        few = self.skipped < MOST_SKIPPED and setting.not_finite == "skip"
        return few and (setting.replicated or not self.loaded)

    @precondition(lambda machine: machine.may_skip)
    @rule(counts=COUNTS, bad=PLACES)
    def skipped_step(self, counts, bad):
        step = Step(counts[: self.job.ranks], bad=bad % self.job.ranks)
        self.skipped += 1
        self._add(step, self.job.lineage + step)

    @rule(kind=st.sampled_from(["together", "alone", "finish"]))
    def look(self, kind):
        if kind == "finish":
            self._add("finish", self.job.lineage + "finish")
        else:
            self._add(Look(kind == "alone"))

    @rule(steps=STEPS, background=BOOLEANS)
    def train_and_save(self, steps, background):
        self._train(steps)
        self._save(background)

    def _save(self, background: bool) -> None:
        saved = Saved(self.job.lineage, self.saves)
        self.saves += 1
        self.saved[saved.clock] = saved
        self._add(Save(saved, background))

    @rule(before=STEPS, background=BOOLEANS, lost=STEPS, after=STEPS)
    def save_and_go_back(self, before, background, lost, after):
        """Beside the other rules, since what a checkpoint lacks shows only in later steps."""
        self._train(before)
        self._save(background)
        clock = self.job.lineage.clock
        self._train(lost)
        self._load(sorted(self.saved, reverse=True).index(clock))
        self._train(after)

    @precondition(lambda machine: machine.saved)
    @rule(which=PLACES, steps=STEPS)
    def load_and_train(self, which, steps):
        self._load(which)
        self._train(steps)

    def _load(self, which: int) -> None:
        clocks = sorted(self.saved, reverse=True)
        which %= len(clocks)
        saved, setting = self.saved[clocks[which]], self.job.setting
        before = saved.lineage
        if not setting.loads(before.setting):
            self._add(Load(saved, newest=which == 0, refused=True))
            return
        self.loaded, lineage, reference = True, before, None
        same = before.ranks == self.job.ranks and setting.continues(before.setting)
        if before.skips or not same:
            reference = self.references
            self.references += 1
            of_references = replace(setting, not_finite="skip")
            lineage = Lineage(
                self.job.ranks, of_references, reference, (), saved.clock, before.skips
            )
        self._add(Load(saved, newest=which == 0, reference=reference), lineage)

    @rule(
        change=st.sampled_from(["nothing", "the order", "ranks", "algorithm", "rate"]),
        to=st.integers(0, 10),
        seed=SEEDS,
        announced=BOOLEANS,
        learner_first=BOOLEANS,
        which=st.none() | PLACES,
        steps=STEPS,
    )
    def begin_again(self, change, to, seed, announced, learner_first, which, steps):
        """Another job, that may load what is there."""
        setting, ranks = self.job.setting, self.job.ranks
        if change == "ranks":
            ranks = 1 + to % 4
        elif change == "algorithm":
            setting = replace(setting, variant=to % len(FAMILIES[setting.family]))
        elif change == "rate":
            setting = replace(setting, rate=to % 2)
        self._begin(setting, ranks, seed, announced=announced, learner_first=learner_first)
        if self.saved and which is not None:
            self._load(which)
        self._train(steps)

    @rule(rank=PLACES, counts=COUNTS, says=BOOLEANS, seed=SEEDS, steps=STEPS)
    def fail_and_begin_again(self, rank, counts, says, seed, steps):
        """The job ends by a problem of a rank, and the next one loads the newest checkpoint."""
        rank, setting = rank % self.job.ranks, self.job.setting
        step = Step(tuple(1 + n for n in counts[: self.job.ranks]), bad=rank)
        says = says or setting.not_finite == "skip"
        self._add(Fail(rank, None if says else step))
        self._begin(setting, self.job.ranks, seed)
        if self.saved:
            self._load(0)
        self._train(steps)

    def teardown(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="history-"))
        checkpoints, references = folder / "checkpoints", folder / "references"
        references.mkdir()
        try:
            expected = Expectations(references)
            for job in self.jobs:
                results, _ = run(job.ranks, Ranks(job, checkpoints, references), job.seed)
                check_job(job, results, expected)
            check_folder(checkpoints, self.saved)
        finally:
            shutil.rmtree(folder)


@pytest.mark.filterwarnings("ignore")
def test_operations_on_a_learner_in_any_order() -> None:
    run_machine(LearnerHistory, *BUDGET)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_block_that_will_be_skipped_is_saved_and_loaded(ranks: int) -> None:
    """Its model is not finite, on one rank, until the block's end."""
    history = LearnerHistory()
    history.begin("model averaging", 0, ranks, 0, "momentum", 0, skips=True, announced=False)
    history.train([((2, 1, 1, 0), 0)] * 2)
    history.skipped_step((1, 1, 2, 0), bad=0)
    history.save_and_go_back([], True, [], [((1, 2, 1, 0), 0)] * 3)
    history.teardown()
