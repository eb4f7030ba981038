"""Histories of fault-tolerant learners: ranks fail, and standby ranks join, between any operations.

The data go by the clock, and a sample adds the same to every model: a model with full precision is
then a function of the clock alone, whatever has failed and has been repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from explored_training import residual_of
from histories import SAMPLES, WHOLE, job_schedule, parameters_of

import parallel_sgd as psgd
from parallel_sgd.communication import Communicator
from parallel_sgd.training.checkpoint.files import checkpoints_in, require_whole, sort_key

DP, RATE = psgd.DataParallelSGD, 1 / 64
SUMS = RATE * np.concatenate([np.zeros((1, WHOLE.shape[1])), WHOLE.cumsum(0)])
"""The model by the clock."""


@dataclass(frozen=True)
class Trained:
    """How a learner trains.

    Args:
        make: the algorithm.
        exact: the model goes by the clock: "always", "finished" (the last gradient comes late),
            "owed" (with what the ranks still have to send), or "no".
    """

    make: Callable[..., Any]
    options: dict[str, Any]
    exact: str = "no"

    @property
    def dtype(self) -> str:
        return "float32" if "gradient_bits" in self.options else "float64"


TRAINED = [
    Trained(DP, {}, "always"),
    Trained(DP, {"transport": "pipelined"}, "always"),
    Trained(DP, {"overlap": True}, "always"),
    Trained(DP, {"double_buffering": True}, "finished"),
    Trained(DP, {"gradient_bits": 1}, "owed"),
    Trained(DP, {"gradient_bits": {0: 8, 9: 1, 21: 4}}, "owed"),
    Trained(DP, {"gradient_bits": 4, "overlap": True}, "owed"),
    Trained(psgd.ModelAveragingSGD, {"sync_steps": 3}),
    Trained(psgd.BlockMomentumSGD, {"sync_steps": 2}),
    Trained(psgd.BlockMomentumSGD, {"sync_steps": 3, "overlap_samples": 4}),
    Trained(psgd.SlowMo, {"sync_steps": 2, "gradient_bits": 8}),
    Trained(psgd.DiLoCo, {"sync_steps": 3}),
]


@dataclass(frozen=True)
class Train:
    """A pass over minibatches of these sizes.

    Attributes:
        sizes: samples of all ranks.
        looks: whether the common models are compared after each step.
    """

    sizes: tuple[int, ...]
    looks: bool = False

    def ends(self, begun: int) -> list[int]:
        """Return the clocks between the minibatches, from the beginning on."""
        return [*accumulate(self.sizes, initial=begun)]


@dataclass(frozen=True)
class Fail:
    """Attributes:
    rank: world rank that fails.
    points: of this rank until then.
    """

    rank: int
    points: int


@dataclass(frozen=True)
class Save:
    background: bool


@dataclass
class End:
    """What a rank has at its end."""

    model: bytes
    clock: int
    size: int
    recovery: dict[str, Any]


@dataclass
class FailingJob:
    """Runs a history on fault-tolerant ranks. What one rank has seen, the others must see.

    Args:
        trained: how the learner trains.
        commit_every: of the learner.
        folder: of checkpoints.
        operations: `Train`, `Save`, `Fail`, "look", "load" and "finish".

    Attributes:
        at: number of the operation of each world rank.
        begun: clock at the beginning of an operation, by its number.
        seen: what the ranks see at the end of an operation, by its number.
        owed: what each rank then has to send, by the operation's number.
        saved: clocks of checkpoints.
        failed: number of failures so far, as the schedule knows.
    """

    trained: Trained
    commit_every: int
    folder: Path
    operations: list[Any]
    at: dict[int, int] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    seen: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    owed: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    saved: list[int] = field(default_factory=list)

    def learner(self, comm: Communicator) -> psgd.Learner:
        make, options = self.trained.make, self.trained.options
        optimizer = psgd.SGD(lr_per_sample=RATE)
        every = self.commit_every
        parameters = parameters_of(self.trained.dtype)
        return psgd.Learner(parameters, optimizer, make(**options), comm, commit_every=every)

    def __call__(self, comm: Communicator) -> End:
        with self.learner(comm) as learner, psgd.Checkpoints(self.folder, keep=1000) as checkpoints:
            at, joins = self._begin(learner), learner.recovery.has_joined
            for number in range(at, len(self.operations)):
                self.at[self._number(learner)] = number
                self._operate(learner, checkpoints, number, joins=joins and number == at)
                self._look(learner, number)
            report = (learner.report() or {})["recovery"]
            return End(
                learner.parameters.flat.tobytes(), learner.samples, learner.comm.size, report
            )

    def _begin(self, learner: Any) -> int:
        """Return the first operation of this rank: of a rank that joins, the present one."""
        if not learner.recovery.has_joined:
            return 0
        return max(self.at[rank] for rank in learner.world.world_ranks if rank in self.at)

    @staticmethod
    def _number(learner: Any) -> int:
        return learner.world.world_ranks[learner.world.rank]

    def _operate(self, learner: Any, checkpoints: Any, number: int, *, joins: bool) -> None:
        operation, begun = self.operations[number], self.begun.setdefault(number, learner.samples)
        match operation:
            case Train():
                self._train(learner, operation, begun)
            case Fail():
                if self._number(learner) == operation.rank:
                    job_schedule().fail_after(operation.rank, operation.points)
            case Save():
                if not joins:  # a save that meets a failure is not made again
                    checkpoints.save(learner, background=operation.background)
                self.saved.append(begun)
                # A rank past this save may be in the next one, and would not make that one again.
                learner.between_steps(lambda: None)
            case "look":
                learner.between_steps(lambda: self._evaluate(learner, begun))
            case "load":
                self._load(learner, begun)
            case "finish":
                learner.finish()
        if operation != "load" and not isinstance(operation, Train):
            assert learner.samples == begun, f"{operation} has set the clock to {learner.samples}"

    def _train(self, learner: Any, train: Train, begun: int) -> None:
        """Train on a source's minibatches, which go by the clock."""
        sizes = dict(zip(train.ends(begun), train.sizes, strict=False))
        rows = WHOLE[np.arange(begun, begun + sum(train.sizes)) % SAMPLES]
        source = psgd.data.Source(
            rows, np.arange(len(rows)), sizes.__getitem__, start=begun, shuffle=False, dtype="f8"
        )
        for x, _ in source.minibatches(learner):
            before = learner.samples
            learner.gradient.flat[...] = -x.sum(0)
            if len(x) and getattr(learner.algorithm, "overlap", False):
                learner.ready("b")
            trained = learner.step(len(x))
            went = learner.samples - before
            assert trained == went or trained == 0 >= went, f"{trained} samples: clock by {went}"
            if train.looks and trained:
                learner.between_steps(partial(self._evaluate, learner, learner.samples))
        end = begun + sum(train.sizes)
        assert learner.samples == end, f"the clock is {learner.samples}, not {end}"

    def _evaluate(self, learner: Any, begun: int) -> None:
        before = learner.parameters.flat.tobytes()
        with learner.evaluation():
            models = learner.comm.allgather_object(learner.parameters.flat.tobytes())
        assert len(set(models)) == 1, "the common models differ"
        assert learner.parameters.flat.tobytes() == before, "the own model is not restored"
        assert learner.samples == begun

    def _load(self, learner: Any, begun: int) -> None:
        try:
            learner.between_steps(lambda: psgd.load_checkpoint(learner, self.folder))
        except psgd.UserError as error:
            assert "no checkpoint" in str(error) or "does not exist" in str(error), error
            # A rank that fails in a save leaves none.
            assert not self.saved or job_schedule().failed, error
            return
        assert learner.samples in self.saved, f"{learner.samples} is loaded, not of {self.saved}"
        newest = learner.samples == max(self.saved)
        assert newest or job_schedule().failed, f"{learner.samples} is loaded of {self.saved}"

    def _look(self, learner: Any, number: int) -> None:
        """Compare with what the others have seen, and with the model of the clock."""
        with learner.shared_model():
            model = learner.parameters.flat.copy()
        where, clock = f"after {self.operations[number]}", learner.samples
        seen = self.seen.setdefault(number, (clock, model.tobytes()))
        assert clock == seen[0], f"{where}: the clock is {clock} and {seen[0]}"
        assert model.tobytes() == seen[1], f"{where}: the common models differ"
        finished = self.operations[number] == "finish"
        if self.trained.exact == "always" or (self.trained.exact == "finished" and finished):
            self.require_model(model, SUMS[clock], where)
        elif self.trained.exact == "owed":
            self._look_at_residuals(learner, number, model)

    def require_model(self, model: np.ndarray, wanted: np.ndarray, where: str) -> None:
        apart = np.abs(model - wanted).max()
        most = 1e-3 if self.trained.exact == "owed" else 0.0
        assert apart <= most, f"{where}: the model is {apart:.3g} away from its samples"

    def _look_at_residuals(self, learner: Any, number: int, model: np.ndarray) -> None:
        """Without failures, the model and what all ranks owe are the samples."""
        owed = self.owed.setdefault(number, {})
        owed[learner.comm.rank] = residual_of(learner)
        if len(owed) == learner.comm.size and not job_schedule().failed:
            wanted = SUMS[learner.samples] + RATE * sum(owed.values())
            self.require_model(model, wanted, f"after {self.operations[number]}")

    def resume(self, comm: Communicator) -> int:
        """Load the newest checkpoint on other ranks, and go on to the end. Return the clock."""
        with self.learner(comm) as learner:
            loaded = psgd.resume(learner, self.folder)
            clock = learner.samples
            assert clock == (loaded.samples if loaded else 0)
            self._train(learner, Train((5, 1, 6)), clock)
            learner.finish()
            assert learner.samples == clock + 12
            model = learner.parameters.flat
            assert len(set(comm.allgather_object(model.tobytes()))) == 1
            if self.trained.exact in ("always", "finished"):
                self.require_model(model, SUMS[clock + 12], "resumed")
            return clock


def check_ends(ends: list[End | None], failed: list[int], job: FailingJob) -> None:
    """Check what the ranks have at their end."""
    left = {rank: end for rank, end in enumerate(ends) if end is not None}
    assert left, "no rank has finished"
    first = next(iter(left.values()))
    for rank, end in left.items():
        assert end.model == first.model, "the models differ"
        assert end.clock == first.clock, "the clocks differ"
        assert end.size == len(end.recovery["ranks"])
        assert set(end.recovery["ranks_lost"]) <= set(failed)
        assert rank in end.recovery["ranks"]
        missing = set(end.recovery["ranks"]) - set(left)
        assert missing <= set(failed), f"ranks {missing} are missing: {failed} have failed"
    again = {end.recovery["samples_trained_again"] for end in left.values()}
    assert len(again) == 1 and (failed or again == {0}), f"{again} samples are trained again"
    checkpoints = checkpoints_in(job.folder)
    for path in checkpoints:
        require_whole(path)
    clocks = {sort_key(path.name)[0] for path in checkpoints}
    assert clocks <= set(job.saved), f"checkpoints of {clocks}: saved are {job.saved}"
    if not failed:
        assert clocks == set(job.saved), f"checkpoints of {clocks}: saved are {job.saved}"
        rest = {path.name for path in job.folder.glob("*")} - {path.name for path in checkpoints}
        assert not rest, f"{rest} are left"
