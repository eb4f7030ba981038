"""Retry after failures of ranks: the one loop of all recoveries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..liveness.failure import RanksChanged, is_rank_failure

if TYPE_CHECKING:
    from ..communicator import Communicator

Result = TypeVar("Result")

MOST_FRUITLESS = 3
"""Reconfigurations in a row in which no rank was missing. After more, something else is wrong."""


def retry(
    comm: Communicator,
    attempt: Callable[[], Result],
    recover: Callable[[], object],
    *,
    failed: bool = False,
) -> Result:
    """Call `attempt` until it returns. After each rank failure call `recover` first.

    Args:
        comm: counts reconfigurations without a missing rank (`fruitless`).
        attempt: work of all ranks.
        recover: called again after a rank failure of its own.
        failed: a rank has failed already: start with `recover`.
    Returns:
        The result of `attempt`.
    Raises:
        Exception: any error except a rank failure; or a rank failure after more than
            `MOST_FRUITLESS` fruitless reconfigurations in a row.

    Collective among the remaining ranks.
    """
    while True:
        try:
            if failed:
                recover()
            failed = False
            return attempt()
        except Exception as error:
            if not can_recover(comm, error):
                raise
            failed = not isinstance(error, RanksChanged)


def can_recover(comm: Communicator, error: BaseException) -> bool:
    """Return True if the remaining ranks can continue after an error. Local."""
    return is_rank_failure(error) and comm.fault_tolerant and comm.fruitless <= MOST_FRUITLESS


def reconfigure_ranks(comm: Communicator) -> None:
    """Continue with the remaining and joining ranks. Collective."""

    def reconfigure() -> None:
        comm.revoke()
        comm.reconfigure(allow_join=True)

    retry(comm, lambda: None, reconfigure, failed=True)
