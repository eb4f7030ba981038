"""Programs to explore: learners of every algorithm, on ranks that fail.

What a sample adds does not depend on the model, or it does: see `training`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import parallel_sgd as psgd
from parallel_sgd import runtime
from parallel_sgd.communication import Communicator
from parallel_sgd.data import with_next
from parallel_sgd.testing import Outcome
from parallel_sgd.training import shares
from parallel_sgd.training.checkpoint.files import checkpoints_in, require_whole

N, MINIBATCH, EPOCHS = 23, 6, 2
TOTAL = N * EPOCHS
RATE = 1 / 64
BETWEEN = 12, 18, 35, TOTAL  #: samples at which models are compared between two steps


@dataclass
class Trained:
    """What a rank has at its end.

    Attributes:
        flat: its final model.
        samples: its clock.
        trained: samples of all ranks in all of its steps.
        recovery: its report.
        residual: what it still has to send of all values, or None.
    """

    flat: np.ndarray
    samples: int
    trained: int
    recovery: dict[str, Any]
    residual: np.ndarray | None = None


def training(
    algorithm: Any,
    optimizer: Any = None,
    dtype: str = "float64",
    *,
    constant: bool = False,
    ahead: bool = False,
    reports: bool = False,
    compares: bool = False,
    surviving: bool = False,
    measures: bool = False,
    **options: Any,
) -> Callable[[Communicator], Trained]:
    """What every rank does: pull the model towards the samples, each its part of them.

    Args:
        constant: the gradients are the samples themselves, whole numbers, whatever the model is.
        ahead: whether the next minibatch is there before a step is taken with this one.
        reports: whether the learner reports its synchronizations.
        compares: whether the ranks compare their common models between some steps.
        surviving: whether the loop is a function of `Learner.surviving`, which compares once more.
        measures: whether the ranks, which differ in speed, measure their shares of minibatches.
        options: of the learner.
    """
    random = np.random.default_rng(0)
    x, y = random.standard_normal((N, 300)), np.arange(N) % 2
    if constant:
        x = np.round(8 * x)
    optimizer = optimizer or (psgd.SGD(lr_per_sample=RATE) if constant else psgd.SGD(lr=0.01))

    def program(comm: Communicator) -> Trained:
        parameters = psgd.Parameters({"W": np.zeros((20, 10), dtype), "b": np.zeros(100, dtype)})
        sizes = {"minibatch_size": MINIBATCH, "epochs": EPOCHS, "dtype": dtype}
        source = psgd.data.Source(x, y, **sizes, shares="measured" if measures else None)
        shares.EVERY = 2
        given = {"commit_every": 3, "sync_perf_stats": 2 if reports else 0} | options
        with psgd.Learner(parameters, optimizer, algorithm, comm, **given) as learner:
            trained = 0

            def train() -> None:
                nonlocal trained
                minibatches = source.minibatches(learner)
                if ahead:
                    minibatches = (minibatch for minibatch, _ in with_next(minibatches))
                for inputs, _ in minibatches:
                    if measures:
                        runtime.sleep(0.1 * (1 + comm.rank) * len(inputs))
                    pull = inputs if constant else parameters.flat - inputs
                    learner.gradient.flat[...] = pull.sum(0)
                    if getattr(algorithm, "overlap", False) and len(inputs):
                        learner.ready("b")
                    taken = learner.step(samples=len(inputs))
                    trained += taken
                    if compares and taken and learner.samples in BETWEEN:
                        learner.between_steps(lambda: compare_models(learner))
                        if surviving:
                            compare_models(learner)

            learner.surviving(train) if surviving else train()
            learner.finish()
            recovery = (learner.report() or {}).get("recovery", {})
            return Trained(
                parameters.flat.copy(), learner.samples, trained, recovery, residual_of(learner)
            )

    return program


def compare_models(learner: Any) -> None:
    """Compare the common model of all ranks, and their clocks."""
    with learner.evaluation():
        models = learner.comm.allgather_object(learner.parameters.flat.tobytes())
    clocks = learner.comm.allgather_object(learner.samples)
    assert len(set(models)) == 1, "the common models differ between two steps"
    assert len(set(clocks)) == 1, f"the clocks are {clocks} between two steps"


def loop_of_its_own(algorithm: Any, **options: Any) -> Callable[[Communicator], Trained]:
    """Training without a source: each minibatch follows from the learner's clock. Each half is to
    survive failures, within the whole."""
    x = np.round(8 * np.random.default_rng(0).standard_normal((TOTAL, 300)))

    def program(comm: Communicator) -> Trained:
        parameters = psgd.Parameters({"W": np.zeros((20, 10)), "b": np.zeros(100)})
        rule = psgd.SGD(lr_per_sample=RATE)
        with psgd.Learner(parameters, rule, algorithm, comm, commit_every=3, **options) as learner:
            trained = 0

            def train_until(end: int) -> None:
                nonlocal trained
                while learner.samples < end:
                    minibatch = x[learner.samples : min(learner.samples + MINIBATCH, end)]
                    inputs = minibatch[learner.comm.rank :: learner.comm.size]
                    learner.gradient.flat[...] = inputs.sum(0)
                    trained += learner.step(samples=len(inputs))

            def train() -> None:
                for end in N, TOTAL:
                    learner.surviving(partial(train_until, end))

            learner.surviving(train)
            learner.finish()
            recovery = (learner.report() or {}).get("recovery", {})
            return Trained(parameters.flat.copy(), learner.samples, trained, recovery)

    return program


def in_turn(*algorithms: Any) -> Callable[[Communicator], list[np.ndarray] | str]:
    """Training of several models in turn, a learner for each: not every failure is survived. Then
    all ranks have an error."""
    x = np.round(8 * np.random.default_rng(0).standard_normal((TOTAL, 40)))

    def train(comm: Communicator) -> list[np.ndarray]:
        with ExitStack() as stack:
            learners = []
            for algorithm in algorithms:
                parameters = psgd.Parameters({"W": np.zeros(40)})
                learner = psgd.Learner(parameters, psgd.SGD(lr=0.01), algorithm, comm)
                learners.append(stack.enter_context(learner))
            first = learners[0]
            while first.samples < TOTAL:
                inputs = x[first.samples : first.samples + MINIBATCH][comm.rank :: comm.size]
                for learner in learners:
                    learner.gradient.flat[...] = inputs.sum(0)
                    learner.step(samples=len(inputs))
            for learner in learners:
                learner.finish()
            return [learner.parameters.flat.copy() for learner in learners]

    def program(comm: Communicator) -> list[np.ndarray] | str:
        try:
            return train(comm)
        except psgd.UserError as error:
            return str(error)

    return program


def check_in_turn(outcome: Outcome) -> None:
    """All have an error, of learners, servers or a wait; or the same models."""
    first, *others = [result for result in outcome.results if result is not None]
    if isinstance(first, str):
        texts = "train a single learner at a time", "takes no steps", "for more than timeout_s"
        assert outcome.failed and any(text in first for text in texts), first
        assert all(isinstance(other, str) for other in others), "some ranks have an error"
    else:
        assert all(np.array_equal(other, first) for other in others), "replicas differ"


def residual_of(learner: Any) -> np.ndarray | None:
    """What a rank still has to send, of all values."""
    exchange = getattr(learner.state, "exchange", None)
    residuals = getattr(exchange, "residuals", None)
    if residuals is None or residuals.worker_error is None:
        return None
    total = residuals.worker_error.astype(np.float64)
    for name, error in residuals.owner_error.items():
        total[exchange.current.owned[name]] += error
    return total


def agreeing_before(
    program: Callable[[Communicator], Trained],
) -> Callable[[Communicator], Trained]:
    """Let the ranks agree on something before they have a learner: ranks that join are told."""

    def agrees(comm: Communicator) -> Trained:
        numbers = comm.allgather_object(comm.world_ranks[comm.rank])
        total = comm.sum_integers(np.array([len(numbers)]))
        start = np.arange(5.0) if comm.rank == 0 else np.zeros(5)
        comm.broadcast(start)
        assert numbers == [0, 1, 2, 3], f"{numbers} have agreed"
        assert (total, start.tolist()) == (16, [0, 1, 2, 3, 4]), f"{total}, {start} are agreed"
        return program(comm)

    return agrees


@dataclass
class TrainingCheck:
    """What must hold at the end of `training`.

    Args:
        same: the order in which ranks run changes nothing: without failures, all bits are those of
            the first outcome, which is without failures.
        exact: whoever fails, the model is that one to rounding: no sample is lost, or trained on
            twice.
        near: else it is at most so far from it, of its norm.
        ahead: minibatches by which a rank may be ahead of the others.
    """

    same: bool = True
    exact: bool = False
    near: float = 0.7
    ahead: int = 1
    first: Trained | None = field(default=None, repr=False)

    def __call__(self, outcome: Outcome) -> None:
        left = [result for result in outcome.results if result is not None]
        assert left or outcome.error, "nobody has finished"
        if outcome.error:
            return
        if self.first is None:
            assert not outcome.failed
            self.first = left[0]
        for one in left:
            assert np.array_equal(one.flat, left[0].flat), "replicas differ"
            assert one.samples == TOTAL, f"the clock is {one.samples}, not {TOTAL}"
            lost = one.recovery.get("ranks_lost", [])
            assert set(lost) <= set(outcome.failed), f"{lost} of {outcome.failed} are lost"
        self.check_losses(left, len(outcome.failed))
        model, expected = left[0].flat, self.first.flat
        if not outcome.failed:
            assert not self.same or np.array_equal(model, expected), "the order changes the model"
        if self.exact:
            apart = np.abs(model - expected).max()
            assert np.allclose(model, expected, rtol=1e-12, atol=1e-13), f"{apart:.3g} too far"
        else:
            apart = np.linalg.norm(model - expected) / np.linalg.norm(expected)
            assert apart <= self.near, f"{apart:.3g} of its norm too far"

    def check_losses(self, left: list[Trained], failed: int) -> None:
        """What was trained on again, is told: also what a failure has ended in the midst."""
        reported = {one.recovery.get("samples_trained_again", 0) for one in left}
        assert len(reported) == 1, f"ranks report {reported} samples trained again"
        again = max(one.trained for one in left) - TOTAL
        most = again + failed * MINIBATCH * self.ahead
        assert again <= reported.pop() <= most, f"{again} to {most} samples are trained again"


@dataclass
class Saving:
    """Training that saves checkpoints in two folders, in its loop and after it."""

    background: ClassVar = True  #: saves in its loop are written in the background
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="explored-")))

    def __call__(self, comm: Communicator) -> Trained:
        parameters, algorithm = psgd.Parameters({"W": np.zeros(40)}), psgd.DataParallelSGD()
        with (
            psgd.Learner(parameters, psgd.SGD(lr=0.01), algorithm, comm, commit_every=3) as learner,
            psgd.Checkpoints(self.folder / "a") as a,
            psgd.Checkpoints(self.folder / "b") as b,
        ):
            x = np.random.default_rng(0).standard_normal((N, 40))
            source = psgd.data.Source(x, np.zeros(N, int), minibatch_size=MINIBATCH, epochs=EPOCHS)
            trained = self.train(learner, source, a)
            a.save(learner)
            b.save(learner)
            learner.finish()
            recovery = (learner.report() or {}).get("recovery", {})
            return Trained(parameters.flat.copy(), learner.samples, trained, recovery)

    def train(self, learner: Any, source: psgd.data.Source, saved: psgd.Checkpoints) -> int:
        """Train to the end, and save after the first epoch. Return the samples of all steps."""
        return sum(self.steps(learner, source, saved))

    def steps(
        self, learner: Any, source: psgd.data.Source, saved: psgd.Checkpoints
    ) -> Iterator[int]:
        """Take steps to the end, and save after the first epoch. Yield the samples of each."""
        for inputs, _ in source.minibatches(learner):
            learner.gradient.flat[...] = (learner.parameters.flat - inputs).sum(0)
            taken = learner.step(samples=len(inputs))
            if taken and learner.samples == N:
                saved.save(learner, background=self.background)
            yield taken


class GoingBack(Saving):
    """Training that goes back once from the second epoch to the checkpoint of the first one."""

    background = False  # a failure ends a write in the background

    def train(self, learner: Any, source: psgd.data.Source, saved: psgd.Checkpoints) -> int:
        loaded = None
        while loaded is None:
            for taken in self.steps(learner, source, saved):
                if taken and learner.samples >= N + 2 * MINIBATCH:
                    break
            loaded = learner.between_steps(lambda: psgd.load_checkpoint(learner, saved.folder))
        return sum(self.steps(learner, source, saved))


@dataclass
class SavingCheck(TrainingCheck):
    """What must hold at the end of `saving`, whose folder is made anew for the next schedule."""

    saving: Saving = field(default_factory=Saving)

    def __call__(self, outcome: Outcome) -> None:
        super().__call__(outcome)
        for name in "ab":
            saved = checkpoints_in(self.saving.folder / name)
            for path in saved:
                require_whole(path)
            names = [path.name for path in saved]  # a failure ends a write in the background
            assert outcome.failed or names[-1].startswith(f"{TOTAL:012d}"), f"checkpoints {names}"
        shutil.rmtree(self.saving.folder)
        self.saving.folder = Path(tempfile.mkdtemp(prefix="explored-"))

    def check_losses(self, left: list[Trained], failed: int) -> None:
        if not isinstance(self.saving, GoingBack):  # it trains again without a failure
            super().check_losses(left, failed)


def saving(kind: type[Saving] = Saving) -> tuple[Saving, SavingCheck]:
    """Return a program that saves, and the check of its outcomes."""
    made = kind()
    return made, SavingCheck(exact=True, saving=made)
