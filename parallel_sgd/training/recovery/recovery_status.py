"""Status messages of the ranks during a recovery with parameter servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...communication.serialization import message
from ...parameter_server import WorkerProgress


@message
@dataclass
class ServedLosses:
    """Values lost so far, for `Learner.report`.

    Attributes:
        residuals: residual values held by failed workers.
        model: model values held by failed servers: a worker's copy has replaced these.
        optimizer: optimizer state values held by failed servers: replaced by 0.
    """

    residuals: int = 0
    model: int = 0
    optimizer: int = 0


def largest(known: list[ServedLosses]) -> ServedLosses:
    """Return the largest counts: some ranks may have counted a failure before the rest."""
    names = vars(known[0])
    return ServedLosses(**{name: max(getattr(losses, name) for losses in known) for name in names})


@message
@dataclass
class RecoveryStatus:
    """The status of one rank during a recovery.

    Attributes:
        started: generation of the ranks at the start of the learner's set-up.
        is_set_up: True if the rank's part of the servers is recorded. No rank trains before all are
            set up.
        completed: True if the rank has the final model.
        progress: of a worker; None from servers and from ranks that join.
        samples: the rank's clock.
        total: samples of all ranks in the rank's current step, or in its latest one.
        began: True if the rank is a worker, and trains with servers that have started from the
            result of the warm start, if there is one.
        losses: so far; None from a rank that joins.
        workers: latest known workers, by world rank; empty from a rank that joins.
        calls: collective calls completed by all workers, as far as the rank knows.
        statistics: of all workers, packed, once completed.
    """

    started: int
    is_set_up: bool
    completed: bool
    progress: WorkerProgress | None
    samples: int
    total: int
    began: bool
    losses: ServedLosses | None
    workers: list[int]
    calls: int
    statistics: list[Any] | None
