"""Histories of workers and parameter servers: jobs, their operations, and what pushes add up to.

Worker number k adds its own vector, times the samples, in each step. The final model of a job is
then the sum over all samples of the workers, of this job and of those whose checkpoints it has
loaded: whatever the order, the number of servers, and the number of workers that go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from histories import job_schedule, parameters_of, refusal

import parallel_sgd as psgd
from parallel_sgd.communication import Communicator
from parallel_sgd.training.checkpoint.files import checkpoints_in, require_whole, sort_key

MOST_WORKERS, BASE = 4, 1000
N = parameters_of("float64").flat.size
DIGITS = np.array([np.full(N, float(BASE**k)) for k in range(MOST_WORKERS)])
RANDOM = np.random.default_rng(1).standard_normal((MOST_WORKERS, N))

SERVED: list[dict[str, Any]] = [
    {"sync_steps": 1},
    {"sync_steps": 3},
    {"sync_steps": 1, "mode": "bounded", "staleness": 1},
    {"sync_steps": 1, "mode": "sync"},
    {"sync_steps": 2, "mode": "sync"},
    {"sync_steps": 2, "currency": "deltas"},
    {"sync_steps": 3, "currency": "deltas", "mode": "geo", "merge": "sum"},
    {"sync_steps": 1, "pipeline": True},
    {"sync_steps": 2, "pipeline": True, "currency": "deltas"},
    {"sync_steps": 1, "gradient_bits": 8},
    {"sync_steps": 2, "gradient_bits": 1, "mode": "sync"},
    {"sync_steps": 1, "gradient_bits": {0: 8, 7: 1, 15: 4}, "pipeline": True},
]
"""Options of the algorithm. Pushes count in full, so that nothing depends on their order."""


@dataclass(frozen=True)
class Train:
    """Steps.

    Args:
        counts: samples of each worker, for each step. In mode "sync" a worker without samples takes
            part, else it goes on.
    """

    counts: tuple[tuple[int, ...], ...]

    def samples(self, workers: int) -> np.ndarray:
        """Return the samples of each worker, [MOST_WORKERS]."""
        total = np.zeros(MOST_WORKERS, int)
        for counts in self.counts:
            total[:workers] += counts[:workers]
        return total


@dataclass(frozen=True)
class Save:
    background: bool


@dataclass(frozen=True)
class Fail:
    """The last operation of a job: a worker reports a problem."""

    worker: int


@dataclass
class End:
    """What a rank has at its end.

    Attributes:
        model: final.
        owed: the residual of its pushes, which are of negative vectors: [n], or None.
        saves: clock at each save; none on a server.
        error: that ended the job, or "".
    """

    model: np.ndarray
    owed: np.ndarray | None = None
    saves: list[int] = field(default_factory=list)
    error: str = ""


@dataclass
class ServedJob:
    """Runs operations on workers and servers.

    Args:
        options: of the algorithm.
        workers, servers: numbers of ranks; 0 servers: every worker serves, too.
        seed: of the ranks' order.
        folder: of checkpoints.
        load: number of the checkpoint to load, from the newest one on, or None.
        operations: `Train`, `Save`, `Fail` and "look".
        begins: samples of each worker in the loaded checkpoint.
        path: of that checkpoint.
    """

    options: dict[str, Any]
    workers: int
    servers: int
    seed: int
    folder: Path
    load: int | None = None
    operations: list[Any] = field(default_factory=list)
    begins: np.ndarray = field(default_factory=lambda: np.zeros(MOST_WORKERS, int))
    path: Path | None = None

    @property
    def ranks(self) -> int:
        return self.workers + self.servers

    @property
    def lossy(self) -> bool:
        return "gradient_bits" in self.options

    @property
    def fails(self) -> bool:
        return bool(self.operations) and isinstance(self.operations[-1], Fail)

    @property
    def vectors(self) -> np.ndarray:
        """What each worker adds for a sample, [MOST_WORKERS, n]."""
        return RANDOM if self.lossy else DIGITS

    def totals(self) -> list[np.ndarray]:
        """Return the samples of each worker before the first operation, and after each."""
        totals = [self.begins]
        for operation in self.operations:
            more = operation.samples(self.workers) if isinstance(operation, Train) else 0
            totals.append(totals[-1] + more)
        return totals

    def __call__(self, comm: Communicator) -> End:
        parameters = parameters_of("float32" if self.lossy else "float64")
        algorithm = psgd.DataParallelASGD(servers=self.servers, min_block=10, **self.options)
        optimizer, end = psgd.SGD(lr_per_sample=1.0), End(parameters.flat)
        checkpoints = psgd.Checkpoints(self.folder, keep=1000)
        with checkpoints, psgd.Learner(parameters, optimizer, algorithm, comm) as learner:
            try:
                if self.path is not None:
                    loaded = psgd.load_checkpoint(learner, self.path)
                    assert comm.rank or learner.samples == loaded.samples
                if not learner.serves:
                    self._work(learner, checkpoints, end)
                learner.finish()
            except psgd.UserError as error:
                if not self.fails:
                    raise
                end.error = str(error)
            else:
                if not learner.serves:
                    refusal(lambda: learner.step(1), "finish()")
                    refusal(lambda: checkpoints.save(learner), "finish()")
                    end.owed = learner.state.residual
        comm.barrier()
        left = job_schedule().background_threads()
        # Rank 0 asks before the others go on.
        assert comm.rank or self.fails or not left, f"threads left after close(): {left}"
        comm.barrier()
        return end

    def _work(self, learner: Any, checkpoints: Any, end: End) -> None:
        seen = np.zeros(MOST_WORKERS)
        for operation, totals in zip(self.operations, self.totals()[1:], strict=True):
            match operation:
                case Train():
                    self._train(learner, operation)
                case Save():
                    checkpoints.save(learner, background=operation.background)
                    end.saves.append(learner.samples)
                case "look":
                    with learner.evaluation():
                        seen = self._look(learner, totals, seen)
                case Fail() if operation.worker == learner.comm.rank:
                    learner.fail("label 12")

    def _train(self, learner: Any, train: Train) -> None:
        worker = learner.comm.rank
        for counts in train.counts:
            if counts[worker] or self.options.get("mode") == "sync":
                learner.gradient.flat[...] = -counts[worker] * self.vectors[worker]
                learner.step(counts[worker])

    def _look(self, learner: Any, totals: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """Check the model that this worker has pulled last. Return the samples of each worker."""
        if self.lossy or (self.path and "currency" in self.options):
            return seen  # of loaded updates other workers may push a share each
        x = learner.parameters.flat
        digits = np.round(x) // BASE ** np.arange(MOST_WORKERS)[:, np.newaxis] % BASE
        # Servers may be at different versions of the model.
        least, most = digits.min(axis=1), digits.max(axis=1)
        assert np.all(most <= totals), f"the model has {most} of {totals} samples"
        assert np.all(least >= seen), f"the model has {least} samples, after {seen}"
        at_once = self.options["sync_steps"] == 1 and not self.options.get("pipeline")
        if at_once and self.options.get("mode") == "sync":
            assert np.all(least == totals), f"the model has {least} of {totals} samples"
        elif at_once and totals[learner.comm.rank] > self.begins[learner.comm.rank]:
            own = least[learner.comm.rank]
            assert own == totals[learner.comm.rank], f"{own} of a worker's own {totals} samples"
        return least

    def check(self, ends: Sequence[End]) -> dict[int, np.ndarray]:
        """Check what the ranks have at their ends.

        Returns:
            The samples of each worker in a checkpoint, by its clock.
        """
        if self.fails:
            texts = {end.error for end in ends}
            assert len(texts) == 1, f"the ranks raise different errors: {texts}"
            (text,) = texts
            assert "label 12" in text and "\n" not in text, text
        else:
            assert len({end.model.tobytes() for end in ends}) == 1, "the final models differ"
            wanted = self.totals()[-1] @ self.vectors
            wanted = wanted + sum(end.owed for end in ends if end.owed is not None)
            apart = np.abs(ends[0].model - wanted).max()
            assert apart < 1e-3, f"the final model is {apart:.3g} away from its samples"
        saves = [o for o, op in enumerate(self.operations, 1) if isinstance(op, Save)]
        return {clock: self.totals()[at] for clock, at in zip(ends[0].saves, saves, strict=True)}


def check_folder(folder: Path, saved: dict[int, np.ndarray]) -> None:
    """Check that a folder holds these checkpoints, whole, and nothing else."""
    found = checkpoints_in(folder)
    clocks = [sort_key(path.name)[0] for path in found]
    assert clocks == sorted(saved), f"checkpoints of {clocks}, not {sorted(saved)}"
    for path in found:
        require_whole(path)
    rest = {path.name for path in folder.glob("*")} - {path.name for path in found}
    assert not rest, f"{rest} are left in the folder"
