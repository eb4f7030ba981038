"""The warm start: at first every rank takes the whole of each minibatch."""

from __future__ import annotations

from typing import Any

from ..algorithms import Algorithm, Work
from ..compression import problem_with
from ..errors import NotFinite


def in_warm_start(algorithm: Algorithm[Any], work: Work) -> bool:
    """Return True if the next minibatch belongs to the warm start. Local."""
    return work.optimizer.state.samples < algorithm.distributed_after


def train_alone(
    algorithm: Algorithm[Any], state: Any, work: Work, samples: int, *, skip: bool = False
) -> int:
    """Take one step of the warm start: all ranks have the same whole minibatch; nothing is
    exchanged.

    After the last step of the warm start all ranks continue from rank 0's model, because machines
    may round differently.

    Args:
        samples: of the minibatch; the same on all ranks.
        skip: skip the minibatch: only the clock advances.
    Returns:
        The samples.
    Raises:
        SharedError: a gradient is not finite, a rank has failed, or the ranks' sample counts
            differ.

    Collective.
    """
    gradient, skipped = work.gradient.flat, work.skipped
    problem = skipped.problem(None if skip else problem_with(gradient))
    if skipped.skips and not algorithm.roles.together:  # through servers this would end training
        work.comm.agree(problem if isinstance(problem, NotFinite) else None)
    work.group.agree_on_whole(problem, samples)
    if samples:
        work.optimizer(gradient, 0 if skip else samples, samples)
    if not in_warm_start(algorithm, work):
        algorithm.end_warm_start(state, work)
    return samples
