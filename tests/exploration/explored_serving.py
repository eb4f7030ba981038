"""Programs to explore: workers and parameter servers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import parallel_sgd as psgd
from parallel_sgd.communication import Communicator
from parallel_sgd.testing import Outcome
from parallel_sgd.training.checkpoint.files import checkpoints_in, require_whole

STEPS, BASE = 6, 100
SHAPES = {"W": (20, 10), "b": (100,)}


@dataclass
class Served:
    """What a rank has at its end.

    Attributes:
        flat: its final model.
        recovery: its report.
        worker: its world rank if it has taken steps, or -1.
        pushed: what its pushes have brought to the servers, or None.
        rows: of its table, or None.
        together: samples of its steps in the warm start.
    """

    flat: np.ndarray
    recovery: dict[str, Any]
    worker: int
    pushed: np.ndarray | None = None
    rows: np.ndarray | None = None
    together: int = 0


def adding(
    algorithm: Any, *, warm: int = 0, gathers: bool = False, surviving: bool = False
) -> Callable[[Communicator], Served]:
    """In every step the worker on rank k adds BASE^k to every value.

    Args:
        warm: steps in which all workers add 1 together, before.
        gathers: the workers gather something half-way.
        surviving: the steps are a function of `Learner.surviving`, called by servers, too.
    """

    def program(comm: Communicator) -> Served:
        parameters = psgd.Parameters({name: np.zeros(shape) for name, shape in SHAPES.items()})
        rank = comm.world_ranks[comm.rank]
        with psgd.Learner(parameters, psgd.SGD(lr=1.0), algorithm, comm) as learner:
            taken = together = 0
            while not learner.serves and learner.samples < warm:
                learner.gradient.flat[...] = -1.0
                together += learner.step(1)

            def train() -> None:
                nonlocal taken
                while not learner.serves and taken < STEPS:
                    learner.gradient.flat[...] = -float(BASE**rank)
                    has_stepped = learner.step(1) > 0  # a failure may undo it
                    taken += has_stepped
                    if gathers and has_stepped and taken == STEPS // 2:
                        learner.surviving(lambda: learner.comm.allgather_object(rank))
                        learner.between_steps(lambda: learner.comm.allgather_object(rank))

            learner.surviving(train) if surviving else train()
            learner.finish()
            recovery = (learner.report() or {})["recovery"]
            return Served(
                parameters.flat.copy(), recovery, rank if taken else -1, together=together
            )

    return program


def few_bits(algorithm: Any) -> Callable[[Communicator], Served]:
    """Pushes of few bits: their residuals are what the workers still have to push."""

    def program(comm: Communicator) -> Served:
        parameters = psgd.Parameters({"W": np.zeros((20, 10), np.float32)})
        number = comm.world_ranks[comm.rank]
        random, given = np.random.default_rng(number), np.zeros(200)
        with psgd.Learner(parameters, psgd.SGD(lr=1.0), algorithm, comm) as learner:
            taken = 0
            while not learner.serves and taken < STEPS:
                gradient = random.standard_normal(200)
                learner.gradient.flat[...] = gradient
                if learner.step(1):
                    given, taken = given + gradient.astype(np.float32), taken + 1
            learner.finish()
            residual = learner.state.residual
            pushed = None if learner.serves or residual is None else given - residual
            recovery = (learner.report() or {})["recovery"]
            return Served(
                parameters.flat.copy(), recovery, number if pushed is not None else -1, pushed
            )

    return program


def rows_of_a_table(*, prefetches: bool = False) -> Callable[[Communicator], Served]:
    """In every step the worker on rank k adds BASE^k to every row."""
    table = psgd.Embedding(name="words", width=2, optimizer=psgd.SGD(lr=1.0), initial_scale=0.0)
    algorithm = psgd.DataParallelASGD(servers=2, sync_steps=1, tables=(table,))
    ids = np.arange(10)

    def program(comm: Communicator) -> Served:
        parameters, number = psgd.Parameters({"W": np.zeros(3)}), comm.world_ranks[comm.rank]
        with psgd.Learner(parameters, psgd.SGD(lr=1.0), algorithm, comm) as learner:
            rows, works = None, not learner.serves
            for _ in range(STEPS * works):
                learner.tables["words"].push(ids, np.full((10, 2), -float(BASE**number), "f4"), 1)
                if prefetches:
                    learner.tables["words"].prefetch(ids)
                learner.step(1)
                if prefetches:
                    learner.tables["words"].rows(ids)
            if works:
                learner.surviving(learner.meet)
                rows = learner.tables["words"].rows(ids)
            learner.finish()
            recovery = (learner.report() or {})["recovery"]
            worker = number if works else -1
            return Served(parameters.flat.copy(), recovery, worker, None, rows)

    return program


@dataclass
class SavingRows:
    """Workers that push rows of a table, and save them in the midst and at the end."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="explored-")))

    def __call__(self, comm: Communicator) -> Served:
        table = psgd.Embedding(name="words", width=2, optimizer=psgd.SGD(lr=1.0), initial_scale=0.0)
        algorithm = psgd.DataParallelASGD(servers=2, sync_steps=1, tables=(table,))
        ids, number = np.arange(10), comm.world_ranks[comm.rank]
        parameters, rows = psgd.Parameters({"W": np.zeros(3)}), None
        with (
            psgd.Checkpoints(self.folder) as checkpoints,
            psgd.Learner(parameters, psgd.SGD(lr=1.0), algorithm, comm) as learner,
        ):
            words, works = learner.tables["words"], not learner.serves
            for step in range(STEPS * works):
                words.push(ids, np.full((10, 2), -float(BASE**number), "f4"), 1)
                learner.step(1)
                if step == STEPS // 2:
                    checkpoints.save(learner)
            if works:
                checkpoints.save(learner)
                rows = words.rows(ids)
            learner.finish()
            recovery = (learner.report() or {})["recovery"]
            worker = number if works else -1
            return Served(parameters.flat.copy(), recovery, worker, None, rows)


@dataclass
class ServingCheck:
    """What must hold at the end of a program with servers.

    Args:
        workers: world ranks of the workers; training ends if all of them fail.
        exact: every push of the workers that are left is in the model once, but for values that
            failed servers have lost.
        warm: added by all workers together.
        rounds: without failures the model is so many times the mean of what workers add; 0: it
            need not be.
        rows_end: training ends if a server fails, since it alone has rows.
    """

    workers: int
    exact: bool = False
    warm: int = 0
    rounds: int = 0
    rows_end: bool = False

    def __call__(self, outcome: Outcome) -> None:
        left: list[Served] = [result for result in outcome.results if result is not None]
        workers = set(range(self.workers))
        if outcome.error:
            ends = len(outcome.failed) >= min(2, len(workers))  # workers: fewer if servers replace
            if self.rows_end and not workers.issuperset(outcome.failed):
                ends = ends or "rows of the tables" in str(outcome.error)
            assert ends, f"{outcome.error} although workers are left"
            return
        assert left, "nobody has finished"
        for one in left:
            assert np.array_equal(one.flat, left[0].flat), "replicas differ"
            lost = one.recovery["ranks_lost"]
            assert set(lost) <= set(outcome.failed), f"{lost} of {outcome.failed} are lost"
            assert one.worker < 0 or one.together == self.warm, f"{one.together} samples together"
        lost_values = max(one.recovery["server_values_lost"] for one in left)
        if self.exact:
            digits = [
                (left[0].flat - self.warm) // BASE**one.worker % BASE
                for one in left
                if one.worker >= 0
            ]
            right = np.all([digit == STEPS for digit in digits], axis=0)
            wrong = (~right).sum()
            assert wrong <= lost_values, f"{wrong} values are wrong, {lost_values} are lost"
        if self.rounds and not outcome.failed:
            mean = self.rounds * sum(BASE**rank for rank in workers) / len(workers)
            assert np.all(left[0].flat == mean), "a round is missing, or there twice"
        pushed = [one.pushed for one in left if one.pushed is not None]
        if pushed and workers.isdisjoint(outcome.failed):
            apart = np.abs(left[0].flat + np.sum(pushed, axis=0)) > 1e-3
            assert apart.sum() <= lost_values, f"{apart.sum()} values lack of pushes"
        for one in left:
            if one.rows is not None:
                pushes = [
                    one.rows // BASE**other.worker % BASE for other in left if other.worker >= 0
                ]
                assert np.all(np.array(pushes) == STEPS), "rows are wrong"


@dataclass
class SavingRowsCheck(ServingCheck):
    """What must hold at the end of `SavingRows`. Its folder is made anew for the next schedule."""

    saving: SavingRows = field(default_factory=SavingRows)

    def __call__(self, outcome: Outcome) -> None:
        super().__call__(outcome)
        saved = checkpoints_in(self.saving.folder)
        for path in saved:
            require_whole(path)
        assert outcome.failed or len(saved) == 2, f"checkpoints {saved}"
        shutil.rmtree(self.saving.folder)
        self.saving.folder = Path(tempfile.mkdtemp(prefix="explored-"))


def saving_rows() -> tuple[SavingRows, SavingRowsCheck]:
    """Return a program that saves rows, and the check of its outcomes."""
    made = SavingRows()
    return made, SavingRowsCheck(workers=2, rows_end=True, saving=made)
