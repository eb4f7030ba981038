"""Minibatches and blocks that are left out of training, since their numbers are not finite."""

from __future__ import annotations

from typing import Any, Literal

from ..algorithms import Algorithm
from ..algorithms.left_out import MOST
from ..communication import Communicator
from ..errors import DivergedError, SharedProblem, UserError
from ..validation import choice, integer
from .runner import AlgorithmAtWork
from .warm_start import is_warm

MOST_SKIPPED = MOST  #: times in a row

NotFinite = Literal["stop", "skip"]
POLICIES: tuple[NotFinite, ...] = ("stop", "skip")


def agree_on_numbers(
    comm: Communicator,
    algorithm: Algorithm[Any],
    not_finite: NotFinite,
    most_skipped: int,
    compare_every: int,
    minibatch_size: int | None,
) -> tuple[bool, int, int, int | None]:
    """See that what a learner is told about its numbers is possible, and the same on all ranks.

    Returns:
        Whether it skips, the others as plain numbers.

    Collective.
    """

    def checked() -> tuple[bool, int, int, int | None]:
        skips = choice("not_finite", not_finite, POLICIES) == "skip"
        if skips:
            require_can_skip(algorithm)
        most = integer("most_skipped", most_skipped, 0)
        size = None if minibatch_size is None else integer("minibatch_size", minibatch_size, 1)
        return skips, most, integer("compare_every", compare_every, 0), size

    skips, most, every, size = comm.together(checked)
    comm.require_agreement(
        {
            "not_finite": not_finite,
            "most_skipped": most,
            "compare_every": every,
            "minibatch_size": size,
        }
    )
    return skips, most, every, size


def require_can_skip(algorithm: Algorithm[Any]) -> None:
    """Refuse an algorithm that cannot leave anything out. Local."""
    own = type(algorithm).leave_out is not Algorithm.leave_out
    if not (own or algorithm.synchronizes_every_step):
        raise UserError(
            f"not_finite='skip': {type(algorithm).__name__} does not synchronize in every step, "
            "and has no leave_out"
        )


def train(at_work: AlgorithmAtWork, samples: int, announced_total: int | None) -> int:
    """`AlgorithmAtWork.train`; what is not finite is left out. Collective.

    What it costs where all is finite: nothing, where the algorithm keeps nothing.
    """
    work = at_work.work
    begun, warm = work.samples, is_warm(at_work.algorithm, work)
    try:
        total = at_work.train(samples, announced_total)
    except DivergedError as error:
        return _leave_out(at_work, samples, announced_total, begun, str(error))
    if warm or at_work.algorithm.synchronizes_every_step:
        work.left_out.keep(work.samples)
    return total


def finish(at_work: AlgorithmAtWork) -> None:
    """`AlgorithmAtWork.finish`, likewise. Collective."""
    algorithm, work = at_work.algorithm, at_work.work
    try:
        at_work.finish()
    except DivergedError as error:
        if not work.left_out.skips or algorithm.synchronizes_every_step:
            raise
        steps, samples = algorithm.leave_out(at_work.state, work)
        _count(at_work, str(error), steps, samples, work.samples - samples)
        algorithm.finish(at_work.state, work)


def _leave_out(
    at_work: AlgorithmAtWork, samples: int, announced_total: int | None, begun: int, problem: str
) -> int:
    """All ranks have agreed that numbers are not finite; the samples of all in the minibatch."""
    algorithm, work = at_work.algorithm, at_work.work
    at_work.failed = False
    if is_warm(algorithm, work) or algorithm.synchronizes_every_step:
        total = at_work.skip(samples, announced_total)
        work.left_out.put_back(begun, work.samples)
        _count(at_work, problem, 1, total, begun)
        return total
    steps, left = algorithm.leave_out(at_work.state, work)
    _count(at_work, problem, steps, left, work.samples - left)
    return work.samples - begun


def _count(at_work: AlgorithmAtWork, problem: str, steps: int, samples: int, begun: int) -> None:
    work = at_work.work
    ended = work.left_out.count(problem, steps, samples, begun, work.samples)
    if ended and not at_work.algorithm.roles.together:
        at_work.fail(SharedProblem(ended))
    if ended:
        at_work.failed = True
        raise DivergedError(ended)
