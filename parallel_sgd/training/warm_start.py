"""The beginning of training in which every rank takes the whole of each minibatch."""

from __future__ import annotations

from typing import Any

from ..algorithms import Algorithm, Work
from ..compression import problem_with
from ..errors import NotFinite


def in_warm_start(algorithm: Algorithm[Any], work: Work) -> bool:
    """Whether the next minibatch is one of the warm start. Local."""
    return work.optimizer.state.samples < algorithm.distributed_after


def train_alone(
    algorithm: Algorithm[Any], state: Any, work: Work, samples: int, *, skip: bool = False
) -> int:
    """One step of the warm start: all ranks have the same whole minibatch; nothing is exchanged.

    With the last one all ranks go on from rank 0's model: machines may round differently.

    Args:
        samples: of the minibatch; the same on all ranks.
        skip: whether the minibatch is left out: only the clock goes on.
    Returns:
        The samples.
    Raises:
        SharedError: a gradient is not finite, a rank has failed, or ranks have not as many samples.

    Collective.
    """
    gradient, skipped = work.gradient.flat, work.skipped
    problem = skipped.problem(None if skip else problem_with(gradient))
    if skipped.skips and not algorithm.roles.together:  # servers would end training by it
        work.comm.agree(problem if isinstance(problem, NotFinite) else None)
    work.group.agree_on_whole(problem, samples)
    if samples:
        work.optimizer(gradient, 0 if skip else samples, samples)
    if not in_warm_start(algorithm, work):
        algorithm.end_warm_start(state, work)
    return samples
