"""Statistics of a worker: staleness of pushes, traffic, and time."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_COUNTED = 255  #: larger staleness is counted as this value
NANO = 1_000_000_000

Array = npt.NDArray[np.int64]


@dataclass
class Seconds:
    """Time of a worker, in seconds.

    With several servers the slowest counts. With `pipeline` exchanges overlap the computation.
    """

    compute: float = 0.0  #: outside of exchanges: gradients, local steps, reading data, evaluating
    #: in exchanges, for other workers' requests, and for slower workers. Of several ranks in a
    #: worker also: for the worker's other ranks, with the sums over these ranks.
    wait: float = 0.0
    wire: float = 0.0  #: in exchanges, encoding, decoding and transfers
    apply: float = 0.0  #: in exchanges, while a server changed its model


@dataclass
class WorkerStatistics:
    """Pushes and pulls of a worker, with their cost."""

    pushes: int = 0  #: pushes that have changed the model
    samples: int = 0  #: samples in these pushes
    version: int = 0  #: version of the latest pulled model (server 0's)
    bytes_sent: int = 0  #: to servers on other ranks
    bytes_received: int = 0  #: from servers on other ranks
    bytes_within: int = 0  #: between the ranks of this worker: sums, and the pulled model
    skipped: int = 0  #: pushes skipped because of non-finite values
    rows_pulled: int = 0  #: distinct rows of tables in each minibatch
    rows_pushed: int = 0  #: distinct rows likewise
    summed_staleness: int = 0  #: sum over all pushes
    largest_staleness: int = 0
    #: Number of pushes by staleness, the largest over all servers; 255 means 255 or more.
    staleness: Counter[int] = field(default_factory=Counter)
    seconds: Seconds = field(default_factory=Seconds)

    def count(self, staleness: int) -> None:
        self.staleness[min(staleness, MAX_COUNTED)] += 1
        self.summed_staleness += staleness
        self.largest_staleness = max(staleness, self.largest_staleness)

    @property
    def mean_staleness(self) -> float:
        pushes = self.staleness.total()
        return self.summed_staleness / pushes if pushes else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        return {
            **{name: getattr(self, name) for name in COUNTED},
            "staleness": {str(s): n for s, n in sorted(self.staleness.items())},
            "mean_staleness": round(self.mean_staleness, 4),
            "seconds": {name: round(s, 4) for name, s in asdict(self.seconds).items()},
        }

    def packed(self) -> Array:
        """Serialize the statistics for a message: int64 [`LENGTH`]."""
        counted = [getattr(self, name) for name in COUNTED]
        seconds = [round(NANO * s) for s in astuple(self.seconds)]
        histogram = [self.staleness[s] for s in range(MAX_COUNTED + 1)]
        return np.array(counted + seconds + histogram, np.int64)


COUNTED = tuple(f.name for f in fields(WorkerStatistics) if f.type == "int")
SECONDS = [f.name for f in fields(Seconds)]
WAIT = len(COUNTED) + SECONDS.index("wait")  #: index of the waiting time in nanoseconds
HISTOGRAM = len(COUNTED) + len(SECONDS)
LENGTH = HISTOGRAM + MAX_COUNTED + 1


def unpacked_statistics(numbers: Array) -> WorkerStatistics:
    """Restore the statistics from `WorkerStatistics.packed`."""
    first, histogram = numbers[:HISTOGRAM].tolist(), numbers[HISTOGRAM:].tolist()
    return WorkerStatistics(
        **dict(zip(COUNTED, first, strict=False)),
        staleness=Counter({s: n for s, n in enumerate(histogram) if n}),
        seconds=Seconds(*(ns / NANO for ns in first[len(COUNTED) :])),
    )
