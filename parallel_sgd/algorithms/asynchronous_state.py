"""What a worker of asynchronous SGD remembers from one step to the next."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar

from ..embedding import RemoteTables
from ..parameter_server import Client, Connection, WorkerStatistics
from ..state import across, workspace
from .algorithm import Array
from .served_state import ServedState


@dataclass(kw_only=True)
class DataParallelASGDState:
    """
    Attributes:
        base: [n], of the currency "deltas": the model that the local steps began from; else None.
        gathered: [n], the summed gradients since the last push, where there are several; else None.
        gathered_samples: of this worker since its last push.
        period_samples, period_steps: since then, of all workers as far as this one knows.
        minibatches: of this worker so far: the ramp's clock.
        residual: float32 [n], what pushes have lost; None in full precision.
        arrived: [n], the model that a push in the background has brought, or is to bring, back;
            None where there is none.
        served: what the servers hold, for checkpoints.
        connection: to the servers; or this rank as one of them.
        tables: this worker's side of the embedding tables.
        sending: the push under way, in the background.
        sent, incoming: [n], what it pushes, and where the model comes in.
        since, blocked: when this worker's last exchange ended, and how long it had been in
            exchanges by then, in seconds.
        finished: whether it has left; then `table` has the statistics of all workers.
    """

    base: Array | None = across("mean", default=None)
    gathered: Array | None = across("sum", default=None)
    gathered_samples: int = across("share", default=0)
    period_samples: int = across("same", default=0)
    period_steps: int = across("same", default=0)
    minibatches: int = across("most", default=0)
    residual: Array | None = across("sum", default=None)
    arrived: Array | None = across("same", default=None)
    served: ServedState = field(default_factory=ServedState)
    connection: Connection = workspace()
    tables: RemoteTables = workspace()
    sending: Future[None] | None = workspace(default=None)
    sent: Array | None = workspace(default=None)
    incoming: Array | None = workspace(default=None)
    since: float = workspace(default=0.0)
    blocked: float = workspace(default=0.0)
    finished: bool = workspace(default=False)
    table: list[WorkerStatistics] | None = workspace(default=None)

    counts: ClassVar[tuple[str, ...]] = (
        *("gathered_samples", "period_samples", "period_steps"),
        "minibatches",
    )

    @property
    def client(self) -> Client:
        """This worker's side of the messages."""
        return self.connection.client
