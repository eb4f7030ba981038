"""Histories of learners without failures of ranks: jobs, their operations, and their lineages.

A *lineage* tells where a state comes from: where it began (a new learner, or a checkpoint loaded
with other ranks or options), and the steps since. The state has the bits of a program that took
these steps alone, whatever else was done meanwhile, and in whatever order the ranks ran.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from histories import Seen, Step, job_schedule, parameters_of, refusal

import parallel_sgd as psgd
from parallel_sgd.communication import Communicator
from parallel_sgd.training.checkpoint.files import checkpoints_in, sort_key

DP, ADAM, MOMENTUM = psgd.DataParallelSGD, psgd.Adam, psgd.MomentumSGD
FALLING = psgd.schedules.Steps({0: 0.02, 9: 0.01, 20: 0.005})
BITS_BY_SAMPLES = {0: 8, 7: 1, 15: 4}

FAMILIES: dict[str, list[tuple[Callable[..., Any], dict[str, Any]]]] = {
    "data-parallel": [
        (DP, {}),
        (DP, {"transport": "pipelined"}),
        (DP, {"gradient_bits": 1}),
        (DP, {"gradient_bits": 1, "code": "sign"}),
        (DP, {"gradient_bits": 4, "overlap": True}),
        (DP, {"gradient_bits": 8, "transport": "pipelined"}),
        (DP, {"gradient_bits": BITS_BY_SAMPLES}),
        (DP, {"gradient_bits": 2, "bits_of": {"b": 32}}),
        (DP, {"gradient_bits": 8, "double_buffering": True}),
        (DP, {"double_buffering": True}),
        (DP, {"gradient_bits": 4, "distributed_after": 7}),
    ],
    "low rank": [(psgd.PowerSGD, {"rank": 2})],
    "model averaging": [
        (psgd.ModelAveragingSGD, {"sync_steps": 2}),
        (psgd.ModelAveragingSGD, {"sync_steps": 2, "gradient_bits": 8}),
        (psgd.ModelAveragingSGD, {"sync_steps": 2, "gradient_bits": 4}),
    ],
    "block momentum": [
        (psgd.BlockMomentumSGD, {"sync_steps": 3}),
        (psgd.BlockMomentumSGD, {"sync_steps": 3, "gradient_bits": 8, "overlap_samples": 5}),
        (psgd.BlockMomentumSGD, {"sync_steps": 3, "gradient_bits": 4, "overlap_samples": 5}),
        (psgd.BlockMomentumSGD, {"block_samples": 12, "distributed_after": 5}),
    ],
    "SlowMo": [
        (psgd.SlowMo, {"sync_steps": 2, "gradient_bits": 1}),
        (psgd.SlowMo, {"sync_steps": 2, "gradient_bits": 8}),
    ],
    "DiLoCo": [
        (psgd.DiLoCo, {"sync_steps": 3}),
        (psgd.DiLoCo, {"sync_steps": 3, "overlap_samples": 4}),
    ],
}
OPTIMIZERS = {
    "SGD": lambda lr: psgd.SGD(lr=lr),
    "momentum": lambda lr: MOMENTUM(lr=lr),
    "Adam": lambda lr: ADAM(lr=lr),
}
RATES = (0.01, FALLING)
MAY_CHANGE = {"transport", "overlap", "code"}  #: on loading, as `load_checkpoint` says


@dataclass(frozen=True)
class Setting:
    """What a learner is made of.

    Args:
        family, variant: of the algorithm.
        optimizer: by name.
        rate: number in `RATES`.
        not_finite: of the learner.
    """

    family: str
    variant: int = 0
    optimizer: str = "SGD"
    rate: int = 0
    not_finite: str = "stop"

    @property
    def options(self) -> dict[str, Any]:
        return FAMILIES[self.family][self.variant][1]

    @property
    def dtype(self) -> str:
        return "float32" if "gradient_bits" in self.options else "float64"

    @property
    def replicated(self) -> bool:
        """True if all ranks hold the common model after each step."""
        return self.family in ("data-parallel", "low rank")

    def learner(self, comm: Communicator) -> psgd.Learner:
        make, options = FAMILIES[self.family][self.variant]
        optimizer = OPTIMIZERS[self.optimizer](RATES[self.rate])
        return psgd.Learner(
            parameters_of(self.dtype),
            optimizer,
            make(**options),
            comm,
            not_finite=self.not_finite,
            compare_every=3,
        )

    def loads(self, saved: Setting) -> bool:
        """Return True if a learner of this setting may load a checkpoint of another setting."""
        if (self.family, self.optimizer) != (saved.family, saved.optimizer):
            return False
        mine, theirs = self.options, saved.options
        for name in (mine.keys() | theirs.keys()) - MAY_CHANGE:
            values = [options.get(name) for options in (mine, theirs)]
            if name == "gradient_bits" and None not in values:  # few bits, both
                continue
            if values[0] != values[1]:
                return False
        return True

    def continues(self, saved: Setting) -> bool:
        """Return True if a learner of this setting continues with the bits of the other."""
        return replace(self, not_finite=saved.not_finite) == saved


@dataclass(frozen=True)
class Lineage:
    """Where a state comes from.

    Attributes:
        ranks, setting: of the learner. It skips steps that are not finite.
        loaded: number of the reference copy of the checkpoint that it began with, or None.
        steps: since: steps, and "finish".
        clock: samples of all ranks.
        skips: a block may be skipped. If a checkpoint was loaded within, the optimizer then begins
            anew: it is not known how it was at the beginning of the block.
    """

    ranks: int
    setting: Setting
    loaded: int | None = None
    steps: tuple[Step | str, ...] = ()
    clock: int = 0
    skips: bool = False

    def __add__(self, step: Step | str) -> Lineage:
        steps = (*self.steps, step)
        if not isinstance(step, Step):
            return replace(self, steps=steps)
        skips = self.skips or (step.is_bad and not self.setting.replicated)
        return replace(self, steps=steps, clock=self.clock + step.total, skips=skips)


@dataclass(frozen=True)
class Saved:
    """A checkpoint, as the model knows it.

    Attributes:
        lineage: of its state.
        extra: number given on each rank, beside the rank.
    """

    lineage: Lineage
    extra: int

    @property
    def clock(self) -> int:
        return self.lineage.clock


@dataclass(frozen=True)
class Save:
    saved: Saved
    background: bool


@dataclass(frozen=True)
class Load:
    """Attributes:
    saved: what is loaded.
    newest: by the name of the folder.
    refused: the learner must refuse it.
    reference: number of the copy that is made of the checkpoint, or None.
    """

    saved: Saved
    newest: bool = False
    refused: bool = False
    reference: int | None = None


@dataclass(frozen=True)
class Look:
    """An evaluation together, or with `alone` a look at the common model by each rank."""

    alone: bool = False


@dataclass(frozen=True)
class Fail:
    """The last operation of a job: a rank reports a problem, or has a gradient that is not finite.

    Attributes:
        rank: that fails.
        step: of all ranks, with that gradient; None: `fail`.
    """

    rank: int
    step: Step | None


@dataclass
class Job:
    """A learner on some ranks, its operations, and the lineage of the state after each.

    Attributes:
        seed: of the ranks' order.
        announced: the ranks announce their counts.
        learner_first: closed before the checkpoints.
    """

    ranks: int
    setting: Setting
    seed: int
    announced: bool = False
    learner_first: bool = False
    operations: list[Any] = field(default_factory=list)
    lineages: list[Lineage] = field(default_factory=list)

    @property
    def lineage(self) -> Lineage:
        return self.lineages[-1]


class Ranks:
    """Runs the operations of a job, on each rank: see `Job`.

    Args:
        folder: of checkpoints.
        references: folder of copies of checkpoints that have been loaded.
    """

    def __init__(self, job: Job, folder: Path, references: Path) -> None:
        self.job, self.folder, self.references = job, folder, references

    def __call__(self, comm: Communicator) -> list[Any]:
        seen: list[Any] = []
        checkpoints = psgd.Checkpoints(self.folder, keep=1000)
        try:
            with self.job.setting.learner(comm) as learner:
                if self.job.learner_first:
                    self._operate(learner, checkpoints, seen)
                else:
                    with checkpoints:
                        self._operate(learner, checkpoints, seen)
            if self.job.learner_first:
                checkpoints.close()
        except psgd.UserError as error:
            if not self.failed:
                raise
            seen.append((str(error), learner.parameters.flat.tobytes()))
            checkpoints.close()
        self._check_closed(learner, checkpoints, seen[-1] if not self.failed else None)
        comm.barrier()
        left = job_schedule().background_threads()
        # Rank 0 asks before the others go on.
        assert comm.rank or self.failed or not left, f"threads left after close(): {left}"
        comm.barrier()
        return seen

    @property
    def failed(self) -> bool:
        return bool(self.job.operations) and isinstance(self.job.operations[-1], Fail)

    def _operate(self, learner: Any, checkpoints: Any, seen: list[Any]) -> None:
        seen.append(Seen.of(learner))
        for operation in self.job.operations:
            match operation:
                case Step():
                    operation.take(learner, announced=self.job.announced)
                case "finish":
                    learner.finish()
                case Look():
                    self._look(learner, checkpoints, operation.alone)
                case Save():
                    extra = {"number": operation.saved.extra, "rank": learner.comm.rank}
                    checkpoints.save(learner, extra, background=operation.background)
                case Load():
                    self._load(learner, checkpoints, operation)
                case Fail():
                    self._fail(learner, operation)
            counts = isinstance(operation, Look | Load) or operation is self.job.operations[-1]
            seen.append(Seen.of(learner, counts=counts))

    @staticmethod
    def _look(learner: Any, checkpoints: Any, alone: bool) -> None:
        before = learner.parameters.flat.tobytes()
        with learner.shared_model() if alone else learner.evaluation():
            shared = learner.parameters.flat.tobytes()
            for call in (
                learner.finish,
                lambda: learner.step(1),
                lambda: checkpoints.save(learner),
            ):
                refusal(call, "must come after the `with` block")
            assert learner.parameters.flat.tobytes() == shared
        assert learner.parameters.flat.tobytes() == before, "the own model is not restored"

    def _load(self, learner: Any, checkpoints: Any, load: Load) -> None:
        clock = load.saved.clock
        path = self.folder
        if not load.newest:
            checkpoints.wait()
            path = next(p for p in checkpoints_in(self.folder) if sort_key(p.name)[0] == clock)
        if load.refused:
            refusal(lambda: psgd.load_checkpoint(learner, path), "is of another")
            return
        loaded = psgd.load_checkpoint(learner, path)
        ranks, saved = load.saved.lineage.ranks, load.saved
        assert (loaded.samples, loaded.ranks) == (clock, ranks), f"{loaded} is loaded"
        assert loaded.extras == [{"number": saved.extra, "rank": k} for k in range(ranks)]
        common = loaded.extras[0] if ranks == 1 else None
        own = loaded.extras[learner.comm.rank] if ranks == learner.comm.size else common
        assert loaded.extra == own
        if learner.comm.rank == 0 and load.reference is not None:
            shutil.copytree(loaded.path, self.references / str(load.reference))
        learner.comm.barrier()

    def _fail(self, learner: Any, fail: Fail) -> None:
        if fail.step is not None:
            fail.step.take(learner, announced=self.job.announced)
        elif learner.comm.rank == fail.rank:
            learner.fail("label 12")
        learner.finish()
        raise AssertionError("finish() must raise the error")

    @staticmethod
    def _check_closed(learner: Any, checkpoints: Any, last: Any) -> None:
        learner.close()
        checkpoints.close()
        if last is not None:
            assert learner.parameters.flat.tobytes() == last.own, "close() has changed the model"
            kept = learner.samples, learner.bytes_sent
            assert kept == (last.clock, last.sent), f"close() leaves {kept}, not {last}"
            learner.report()
        for call in (
            learner.meet,
            learner.finish,
            lambda: learner.step(1),
            lambda: learner.ready("b"),
            lambda: learner.fail("label 12"),
            lambda: learner.evaluation().__enter__(),
            lambda: learner.shared_model().__enter__(),
            lambda: checkpoints.save(learner),
            lambda: psgd.load_checkpoint(learner, checkpoints.folder),
        ):
            refusal(call, "closed")
