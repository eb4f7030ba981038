"""Programs to explore: sessions with checkpoints, the best model and run folders, also resumed."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import parallel_sgd as psgd
from parallel_sgd.communication import Communicator, simulate
from parallel_sgd.testing import Outcome
from parallel_sgd.training.checkpoint.files import PART, checkpoints_in, require_whole

SAMPLES, SIZE, EPOCHS = 60, 6, 2
TOTAL = SAMPLES * EPOCHS

X = np.random.default_rng(0).standard_normal((SAMPLES, 4)).astype(np.float32)
DATA = psgd.data.Arrays(X, X[:, :3].argmax(1))


@dataclass
class Ran:
    """What a rank has at its end.

    Attributes:
        flat: its final model.
        rows: samples of its rows.
        called: samples with the calls of the callback.
        serves: it has no rows.
    """

    flat: np.ndarray
    rows: list[int]
    called: list[int]
    serves: bool


@dataclass
class Session:
    """A session in a folder of its own.

    Args:
        algorithm: of the learner.
        rates: of the learning rate, by samples.
        options: of the session.
        resumed: the session begins with a checkpoint half-way.
        restore_best: it ends with its best model.
    """

    algorithm: Any
    rates: Any = 0.05
    options: dict[str, Any] = field(default_factory=dict)
    resumed: bool = False
    restore_best: bool = True
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="explored-")))

    def __call__(self, comm: Communicator, *, resume: bool = True, epochs: int = EPOCHS) -> Ran:
        again = any(checkpoints_in(self.folder / "checkpoints"))
        model, called = psgd.models.MLP([4, 3], seed=1, dtype=np.float64), list[int]()
        with psgd.Learner(
            model.parameters,
            psgd.MomentumSGD(lr=self.rates),
            self.algorithm,
            comm,
            commit_every=3,
        ) as learner:
            rows = psgd.TrainingSession(
                learner=learner,
                objective=model,
                train=DATA,
                minibatch_size=SIZE,
                epochs=epochs,
                validation=psgd.CrossValidation(
                    data=DATA, every=30, patience=50, restore_best=self.restore_best
                ),
                callbacks=[lambda row: called.append(row.samples)],
                checkpoints=psgd.CheckpointConfig(
                    folder=self.folder / "checkpoints", every=24, resume=resume, keep=2
                ),
                folder=psgd.RunFolder(self.folder / "run", plot=False, resumed=again),
                **self.options,
            ).run()
            return Ran(
                model.parameters.flat.copy(), [row.samples for row in rows], called, learner.serves
            )

    def prepare(self) -> None:
        """Make an empty folder, or one with a checkpoint of half of the session."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = Path(tempfile.mkdtemp(prefix="explored-"))
        if self.resumed:
            simulate(3, lambda comm: self(comm, epochs=1))


@dataclass
class SessionCheck:
    """What must hold at the end of a session.

    Args:
        session: the session; its folder is made anew for the next schedule.
        exact: the model is that of a session without faults, to rounding, also if an ended session
            is resumed on another number of ranks.
        last: the newest checkpoint is the one of the end.
        ranks: numbers of ranks to resume on, in turn.
    """

    session: Session
    exact: bool = True
    last: bool = True
    ranks: tuple[int, ...] = (2, 3, 4)
    first: Ran | None = field(default=None, repr=False)
    count: int = 0

    def __post_init__(self) -> None:
        self.session.prepare()

    def __call__(self, outcome: Outcome) -> None:
        self.count += 1
        left: list[Ran] = [result for result in outcome.results if result is not None]
        if self.first is None:
            assert outcome.error is None, f"{outcome.error}"
            self.first = next(one for one in left if not one.serves)
        assert not isinstance(outcome.error, psgd.RanksLost), "a rank has not recovered"
        folder = self.session.folder / "checkpoints"
        for path in checkpoints_in(folder):
            require_whole(path)
        parts = [path.name for path in folder.glob("*") if PART.fullmatch(path.name)]
        if outcome.error is not None:
            self.resume()
        else:
            self.check_end(left)
            assert outcome.failed or not parts, f"{parts} are left"
            assert not (folder / ".lock").exists(), "the lock is left"
            names = [path.name for path in checkpoints_in(folder)]
            assert not self.last or names[-1].startswith(f"{TOTAL:012d}"), f"checkpoints {names}"
        self.session.prepare()

    def check_end(self, left: list[Ran]) -> None:
        """Check the results of a session that has come to its end, and its folder."""
        assert self.first is not None
        assert left, "nobody has finished"
        for one in left:
            if one.serves:
                continue
            assert one.rows == self.first.rows, f"rows at {one.rows}, not {self.first.rows}"
            calls = [*dict.fromkeys(one.called)]  # once more after a failure
            missing = len(one.rows) - len(calls)  # if it has joined
            assert calls == one.rows[missing:], f"calls at {one.called}"
            assert np.array_equal(one.flat, left[0].flat) or left[0].serves, "replicas differ"
            if self.exact:
                apart = np.abs(one.flat - self.first.flat).max()
                assert apart < 1e-11, f"the model is {apart:.3g} away"
        lines = (self.session.folder / "run" / "metrics.jsonl").read_text().splitlines()
        logged = [json.loads(line)["samples"] for line in lines]
        assert logged == self.first.rows, f"metrics at {logged}"
        with np.load(self.session.folder / "run" / "model.npz") as saved:
            assert all(np.isfinite(saved[name]).all() for name in saved), "model.npz is wrong"

    def resume(self) -> None:
        """Resume an ended session, on another number of ranks, to its end."""
        if not checkpoints_in(self.session.folder / "checkpoints"):  # it starts anew
            shutil.rmtree(self.session.folder / "run", ignore_errors=True)
        old, new = self.session.folder, Path(tempfile.mkdtemp(prefix="explored-"))
        # This process still holds locks in the old folder, and knows what has failed there.
        shutil.copytree(old, new, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".lock"))
        shutil.rmtree(old)
        self.session.folder = new
        self.check_end(simulate(self.ranks[self.count % len(self.ranks)], self.session))


def session(
    algorithm: Any, check: dict[str, Any] | None = None, **given: Any
) -> Callable[[], tuple[Session, SessionCheck]]:
    """Return a function that makes a session, and the check of its outcomes."""

    def make() -> tuple[Session, SessionCheck]:
        made = Session(algorithm, **given)
        return made, SessionCheck(made, **(check or {}))

    return make
