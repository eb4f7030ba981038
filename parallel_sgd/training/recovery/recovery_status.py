"""What ranks tell each other of themselves as they go on with parameter servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...communication.serialization import message
from ...parameter_server import WorkerProgress


@message
@dataclass
class ServedLosses:
    """What has been lost so far, for `Learner.report`.

    Attributes:
        residuals: values of residuals that were held by workers that have died.
        model: values that were held by servers that have died: a worker's copy took their place.
        optimizer: values of the optimizer's state that they held, which are 0 since then.
    """

    residuals: int = 0
    model: int = 0
    optimizer: int = 0


def largest(known: list[ServedLosses]) -> ServedLosses:
    """Of what ranks know: some may have counted a death that others have not."""
    names = vars(known[0])
    return ServedLosses(**{name: max(getattr(losses, name) for losses in known) for name in names})


@message
@dataclass
class RecoveryStatus:
    """What every rank tells the others as they go on.

    Attributes:
        completed: whether it has the final model.
        pulled: of a worker that training goes on from.
        samples: its clock.
        total: samples of all in the step that it is in the midst of, or in its latest one.
        began: whether its warm start, if there is one, is over for servers too.
        losses: so far; None from a rank that joins.
        workers: that it has known last, by their ranks in the world; none from a rank that joins.
        calls: that all workers have come to the end of, as far as it knows.
        statistics: of all workers, packed, if the model is complete.
    """

    completed: bool
    pulled: WorkerProgress | None
    samples: int
    total: int
    began: bool
    losses: ServedLosses | None
    workers: list[int]
    calls: int
    statistics: list[Any] | None
