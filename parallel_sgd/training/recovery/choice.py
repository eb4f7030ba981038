"""Choice of a learner's recovery, by its ranks and its algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from .base import Recoverable, Recovery
from .rank_shards import ServedLearner
from .rollback import Rollback
from .server_failover import ServerFailover


def recovery_of(
    learner: Recoverable, set_up: Callable[[], None], commit_every: int, before: Recovery
) -> Recovery:
    """Return the recovery for a learner. Local.

    Args:
        learner: with its ranks and its algorithm.
        set_up: see `Reconfiguring`.
        commit_every: see `Rollback`.
        before: the recovery of an earlier setup, which a rank failure has ended. A failover stays:
            it knows this rank's shards.
    """
    if not learner.world.fault_tolerant or isinstance(before, ServerFailover):
        return before
    if learner.runner.algorithm.roles.together:
        return Rollback(learner, set_up, commit_every)
    return ServerFailover(cast(ServedLearner, learner), set_up)
