"""Programs to explore: sessions with checkpoints, the best model and run folders, also resumed."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import parallel_sgd as psgd
from parallel_sgd.communication import Communicator, simulate
from parallel_sgd.errors import PeerFailure, SharedError, SharedPeerFailure, UserError
from parallel_sgd.testing import Outcome
from parallel_sgd.training.checkpoint.files import PART, checkpoints_in, require_whole

SAMPLES, SIZE, EPOCHS = 60, 6, 2
TOTAL = SAMPLES * EPOCHS

X = np.random.default_rng(0).standard_normal((SAMPLES, 4)).astype(np.float32)
DATA = psgd.data.Arrays(X, X[:, :3].argmax(1))
PROBLEM = "a sample is wrong"
Places = Sequence[int]


class Perceptron(psgd.models.MLP):
    """A linear model with wrong results on rank 0 at some places in the data.

    Args:
        nan_at: samples at the places where the gradient is NaN.
        above: and while the factor on the learning rate is larger than this.
        infinite_at: samples at the places where the loss is infinite.
        problem_at: samples at the places where there is an error instead.
    """

    def __init__(
        self, nan_at: Places, above: float, infinite_at: Places, problem_at: Places
    ) -> None:
        super().__init__([4, 3], seed=1, dtype=np.float64)
        self.nan_at, self.above = nan_at, above
        self.infinite_at, self.problem_at = infinite_at, problem_at
        self.learner: psgd.Learner | None = None

    def gradient(self, *given: Any, out: psgd.Parameters, **options: Any) -> float:
        loss, learner = super().gradient(*given, out=out, **options), self.learner
        assert learner is not None
        first, factor = learner.comm.rank == 0, learner.local_step.state.lr_factor
        if first and learner.samples in self.problem_at:
            raise UserError(PROBLEM)
        if first and learner.samples in self.nan_at and factor > self.above:
            out.flat[0] = np.nan
        return math.inf if first and learner.samples in self.infinite_at else loss


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
        validation: options of its cross-validation, or None.
        resumed: the session begins with a checkpoint half-way.
        saves: it writes checkpoints.
        calls: it has a callback, which all ranks call.
        ends_at: samples at which the callback ends it, or None.
        nan_at, above, infinite_at, problem_at: of `Perceptron`.
    """

    algorithm: Any
    rates: Any = 0.05
    options: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] | None = field(default_factory=lambda: {"restore_best": True})
    resumed: bool = False
    saves: bool = True
    calls: bool = True
    ends_at: int | None = None
    nan_at: Places = ()
    above: float = 0.0
    infinite_at: Places = ()
    problem_at: Places = ()
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="explored-")))

    def __call__(self, comm: Communicator, *, resume: bool = True, epochs: int = EPOCHS) -> Ran:
        try:
            return self.run(comm, resume, epochs)
        except SharedError as error:  # servers know the line of the workers alone
            if str(error).startswith("a rank has failed"):
                raise SharedPeerFailure(str(error)) from error
            raise

    def run(self, comm: Communicator, resume: bool, epochs: int) -> Ran:
        again = any(checkpoints_in(self.folder / "checkpoints"))
        model = Perceptron(self.nan_at, self.above, self.infinite_at, self.problem_at)
        called = list[int]()
        checkpoints = psgd.CheckpointConfig(
            folder=self.folder / "checkpoints", every=24, resume=resume, keep=2
        )
        validation = {"data": DATA, "every": 30, "patience": 50} | (self.validation or {})

        def row_made(row: psgd.Progress) -> bool:
            called.append(row.samples)
            return row.samples != self.ends_at

        with psgd.Learner(
            model.parameters,
            psgd.MomentumSGD(lr=self.rates),
            self.algorithm,
            comm,
            commit_every=3,
        ) as learner:
            model.learner = learner
            rows = psgd.TrainingSession(
                learner=learner,
                objective=model,
                train=DATA,
                minibatch_size=SIZE,
                epochs=epochs,
                validation=psgd.CrossValidation(**validation)
                if self.validation is not None
                else None,
                callbacks=[row_made] if self.calls else [],
                checkpoints=checkpoints if self.saves else None,
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
        rows: all ranks and the folder have the rows of a session without faults.
        ranks: numbers of ranks to resume on, in turn.
    """

    session: Session
    exact: bool = True
    last: bool = True
    rows: bool = True
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
            self.check_rows(one.rows)
            calls = [*dict.fromkeys(one.called)]  # once more after a failure
            expected = [*dict.fromkeys(self.first.called)]
            missing = len(expected) - len(calls)  # if it has joined
            assert calls == expected[missing:], f"calls at {one.called}, not {expected}"
            assert np.array_equal(one.flat, left[0].flat) or left[0].serves, "replicas differ"
            if self.exact:
                apart = np.abs(one.flat - self.first.flat).max()
                assert apart < 1e-11, f"the model is {apart:.3g} away"
        if all(one.serves for one in left):
            return  # the last worker has failed after the end of the servers, before its last row
        lines = (self.session.folder / "run" / "metrics.jsonl").read_text().splitlines()
        logged = [json.loads(line)["samples"] for line in lines]
        assert logged, "no metrics"
        self.check_rows(logged)
        with np.load(self.session.folder / "run" / "model.npz") as saved:
            assert all(np.isfinite(saved[name]).all() for name in saved), "model.npz is wrong"

    def check_rows(self, samples: list[int]) -> None:
        """Check the samples of a rank's rows, or of the folder's."""
        assert self.first is not None
        if self.rows:
            assert samples == self.first.rows, f"rows at {samples}, not {self.first.rows}"
        else:
            assert samples == sorted(samples), f"rows at {samples}"

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


@dataclass
class Ending:
    """A session that ends with an error. All ranks return its line."""

    session: Session

    def __call__(self, comm: Communicator) -> str:
        try:
            self.session(comm)
        except (PeerFailure, SharedPeerFailure):
            raise
        except UserError as error:
            return str(error)
        return ""


@dataclass
class EndingCheck:
    """All ranks end with the error's line, and what is on the disk is whole.

    Args:
        session: the session; its folder is made anew for the next schedule.
        text: of the line.
    """

    session: Session
    text: str

    def __call__(self, outcome: Outcome) -> None:
        lines = {line for line in outcome.results if line is not None}
        assert len(lines) == 1 or outcome.error, f"the ranks end with {lines}"
        assert all(self.text in line for line in lines), f"the ranks end with {lines}"
        for path in checkpoints_in(self.session.folder / "checkpoints"):
            require_whole(path)
        self.session.prepare()


def ending(text: str, algorithm: Any, **given: Any) -> Callable[[], tuple[Ending, EndingCheck]]:
    """Return a function that makes a session which ends with an error, and the check of its end."""

    def make() -> tuple[Ending, EndingCheck]:
        made = Session(algorithm, **given)
        made.prepare()
        return Ending(made), EndingCheck(made, text)

    return make


def session(
    algorithm: Any, check: dict[str, Any] | None = None, **given: Any
) -> Callable[[], tuple[Session, SessionCheck]]:
    """Return a function that makes a session, and the check of its outcomes."""

    def make() -> tuple[Session, SessionCheck]:
        made = Session(algorithm, **given)
        return made, SessionCheck(made, **(check or {}))

    return make
