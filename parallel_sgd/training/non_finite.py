"""Skipping of minibatches and blocks with numbers that are not finite."""

from __future__ import annotations

from typing import Any, Literal

from ..algorithms import Algorithm
from ..algorithms.skipped import MOST
from ..errors import DivergedError, SharedProblem, UserError
from .runner import AlgorithmRunner, in_warm_start

MOST_SKIPPED = MOST  #: times in a row

NotFinite = Literal["stop", "skip"]
POLICIES: tuple[NotFinite, ...] = ("stop", "skip")


def require_can_skip(algorithm: Algorithm[Any]) -> None:
    """Refuse an algorithm that cannot skip. Local."""
    own = type(algorithm).skip is not Algorithm.skip
    if not (own or algorithm.synchronizes_every_step):
        raise UserError(
            f"not_finite='skip' needs an algorithm that can skip: {type(algorithm).__name__} does "
            "not synchronize in every step, and has no skip method"
        )
    if algorithm.has_quorum:
        raise UserError(
            "not_finite='skip' must be 'stop' with quorum or grace_s: a block is skipped by all "
            "ranks together"
        )


def train(runner: AlgorithmRunner, samples: int, announced_total: int | None) -> int:
    """Run `AlgorithmRunner.train`, and skip infinite or NaN numbers. Collective.

    Cost with finite numbers: none, if the algorithm keeps no copy for skipping.
    """
    work = runner.work
    begun, warm = work.samples, in_warm_start(runner.algorithm, work)
    try:
        total = runner.train(samples, announced_total)
    except DivergedError as error:
        return _skip(runner, samples, announced_total, begun, str(error))
    if warm or runner.algorithm.synchronizes_every_step:
        work.skipped.keep(work.samples)
    return total


def finish(runner: AlgorithmRunner) -> None:
    """Run `AlgorithmRunner.finish`, and skip infinite or NaN numbers. Collective."""
    algorithm, work = runner.algorithm, runner.work
    try:
        runner.finish()
    except DivergedError as error:
        if not work.skipped.skips or algorithm.synchronizes_every_step:
            raise
        steps, samples = algorithm.skip(runner.state, work)
        _count(runner, str(error), steps, samples, work.samples - samples)
        algorithm.finish(runner.state, work)


def _skip(
    runner: AlgorithmRunner, samples: int, announced_total: int | None, begun: int, problem: str
) -> int:
    """Skip, after all ranks have agreed on a problem with their numbers. Return the samples of all
    ranks in the minibatch."""
    algorithm, work = runner.algorithm, runner.work
    runner.failed = False
    if in_warm_start(algorithm, work) or algorithm.synchronizes_every_step:
        total = runner.skip(samples, announced_total)
        work.skipped.restore(begun, work.samples)
        _count(runner, problem, 1, total, begun)
        return total
    steps, left = algorithm.skip(runner.state, work)
    _count(runner, problem, steps, left, work.samples - left)
    return work.samples - begun


def _count(runner: AlgorithmRunner, problem: str, steps: int, samples: int, begun: int) -> None:
    work = runner.work
    ended = work.skipped.count(problem, steps, samples, begun, work.samples)
    if ended and not runner.algorithm.roles.together:
        runner.fail(SharedProblem(ended))
    if ended:
        runner.failed = True
        raise DivergedError(ended)
