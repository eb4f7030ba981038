"""Histories of a learner: operations drawn one by one, run by ranks as threads in a drawn order.

A history is a sequence of jobs, on a folder of checkpoints. `History` draws operations, and keeps
the model of what must hold; `run` runs a job; `Seen` is what a rank sees after an operation.
"""

from __future__ import annotations

import gc
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

import parallel_sgd as psgd
from parallel_sgd import runtime
from parallel_sgd.communication import Communicator, simulate, simulate_recovery
from parallel_sgd.communication.background import uncollected
from parallel_sgd.testing.exploration.faults import Failure, Planned, file_operations
from parallel_sgd.testing.exploration.scheduler import Schedule, Strategy
from parallel_sgd.testing.exploration.strategies import Deviations, Priorities, RandomOrder

VALUES, SAMPLES = 300, 512
DATA = np.random.default_rng(0).standard_normal((SAMPLES, VALUES))
WHOLE = np.round(8 * DATA)  #: gradients whose sums are exact in any order
EXPECTED_POINTS = 3000  #: of a job, for the places of changes of priority


class JobSchedule(Schedule):
    """A schedule whose ranks fail on command.

    Args:
        seed: of the order. Even: random. Odd: by priorities. None: each rank runs until it waits.
    """

    def __init__(self, seed: int | None) -> None:
        random = Random(seed or 0)
        self.planned = Planned(random=random)
        strategy: Strategy
        if seed is None:
            strategy = Deviations({})
        elif seed % 2:
            strategy = Priorities(random, EXPECTED_POINTS)
        else:
            strategy = RandomOrder(random)
        super().__init__(strategy, self.planned)

    def fail_after(self, rank: int, points: int) -> None:
        """Let a rank fail so many points from now."""
        self.planned.failures.append(Failure(rank, self.points_of[rank] + points))

    def background_threads(self) -> list[str]:
        """Return the names of the ranks' threads, except the ranks themselves."""
        names = [task.name for task in self._tasks if task.process is not None]
        return [name for name in names if not name.startswith("rank ")]


def run(
    ranks: int,
    program: Callable[[Communicator], Any],
    seed: int | None = None,
    *,
    spares: int | None = None,
) -> tuple[list[Any], JobSchedule]:
    """Run a job in the order of a seed. Return the ranks' results.

    Args:
        spares: number of standby ranks of fault-tolerant ranks. None: a failure ends the job.
    """
    schedule, results = JobSchedule(seed), list[Any]()

    def main() -> None:
        if spares is None:
            results.extend(simulate(ranks, program))
        else:
            results.extend(simulate_recovery(ranks, program, spares=spares))

    before, said = uncollected(), io.StringIO()
    with _no_collection(), redirect_stdout(said), redirect_stderr(said), file_operations(schedule):
        schedule.run(main)
    unheard = [task.error() for task in uncollected() if task not in before]
    assert not unheard, f"errors of threads that no rank has asked for: {unheard}"
    return results, schedule


@contextmanager
def _no_collection() -> Iterator[None]:
    """Inside, finalizers do not run at chance points."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def job_schedule() -> JobSchedule:
    """Return the schedule of the calling rank."""
    schedule = runtime.scheduler()
    assert isinstance(schedule, JobSchedule)
    return schedule


@dataclass(frozen=True)
class Seen:
    """What a rank sees after an operation.

    Attributes:
        own: bytes of its own model.
        shared: bytes of the common model.
        clock: samples.
        sent: bytes sent, or None: to count these ends what runs in the background.
    """

    own: bytes
    shared: bytes
    clock: int
    sent: int | None

    @classmethod
    def of(cls, learner: Any, *, counts: bool = True) -> Seen:
        x = learner.parameters.flat
        own = x.tobytes()
        with learner.shared_model():
            shared = x.tobytes()
        assert x.tobytes() == own, "shared_model() has changed this rank's own model"
        return cls(own, shared, learner.samples, learner.bytes_sent if counts else None)

    def difference(self, right: Seen, dtype: str) -> str:
        """Describe the first difference from what is right; empty if there is none."""
        for name in ("clock", "sent"):
            have, wanted = getattr(self, name), getattr(right, name)
            if have is not None and have != wanted:
                return f"{name} is {have}, not {wanted}"
        for name in ("shared", "own"):
            have, wanted = getattr(self, name), getattr(right, name)
            if have != wanted:
                vectors = [np.frombuffer(values, dtype) for values in (have, wanted)]
                apart = np.abs(vectors[0] - vectors[1]).max()
                return f"{name} model has other bits, {apart:.3g} away"
        return ""


@dataclass(frozen=True)
class Step:
    """A step: how many samples each rank has.

    Args:
        counts: by rank.
        data: number of the place in the data, so that two branches of a history differ.
        bad: rank whose gradient is not finite, or None.
    """

    counts: tuple[int, ...]
    data: int = 0
    bad: int | None = None

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def is_bad(self) -> bool:
        return self.bad is not None and self.counts[self.bad] > 0

    def take(self, learner: Any, *, announced: bool = False) -> None:
        """Take the step. Collective."""
        rank, total = learner.comm.rank, self.total
        begin = learner.samples + 61 * self.data
        samples = total
        if learner.distributed:  # else every rank has the whole minibatch
            begin += sum(self.counts[:rank])
            samples = self.counts[rank]
        indices = np.arange(begin, begin + samples) % SAMPLES
        x = learner.parameters.flat
        learner.gradient.flat[...] = samples * x - DATA[indices].sum(0)
        if rank == self.bad and self.is_bad:
            learner.gradient.flat[7] = np.nan
        if announced:
            learner.announce(samples, total)
        if samples and getattr(learner.algorithm, "overlap", False) and learner.distributed:
            learner.ready("b")
        trained = learner.step(samples)
        assert trained == total, f"step returned {trained}, not {total} samples"


def parameters_of(dtype: str) -> psgd.Parameters:
    return psgd.Parameters({"W": np.zeros((20, 10), dtype), "b": np.zeros(100, dtype)})


def refusal(call: Callable[[], object], part: str) -> str:
    """Return the error of a call that must be refused with one line."""
    try:
        call()
    except psgd.UserError as error:
        text = str(error)
        assert part in text and "\n" not in text, f"{part!r} must be in one line: {text}"
        return text
    raise AssertionError(f"must be refused ({part})")


def run_machine(
    machine: type[RuleBasedStateMachine],
    examples: int,
    steps: int,
    *,
    shrinks: bool = True,
    first: int | None = None,
) -> None:
    """Run drawn histories.

    Args:
        examples: number of histories.
        steps: most operations of a history.
        shrinks: make the first history that fails as short as possible.
        first: seed. None: always the same histories.
    """
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=first is None,
        report_multiple_bugs=False,
        phases=(Phase.generate, *[Phase.shrink] * shrinks),
        suppress_health_check=[*HealthCheck],
    )
    cores = os.sched_getaffinity(0)
    # One thread runs at a time: on one core the next one need not be woken elsewhere.
    os.sched_setaffinity(0, {min(cores)})
    try:
        with np.errstate(all="ignore"):
            seeded = machine if first is None else seed(first)(machine)
            run_state_machine_as_test(seeded, settings=chosen)
    finally:
        os.sched_setaffinity(0, cores)
