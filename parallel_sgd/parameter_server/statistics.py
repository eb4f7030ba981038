"""What a worker of a parameter server can tell: how stale its pushes were, where its time went."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST_COUNTED = 255  #: larger ones are counted as this one
NANO = 1_000_000_000

Array = npt.NDArray[np.int64]


@dataclass
class Seconds:
    """Where a worker's time went, in seconds.

    Of several servers the slowest counts. With `pipeline` exchanges run beside the computation.
    """

    compute: float = 0.0  #: outside of exchanges: gradients, local steps, reading data, evaluating
    wait: float = 0.0  #: in them, for other workers' requests, and those that it must not lead
    wire: float = 0.0  #: in them, encoding and decoding, and on the way to servers and back
    apply: float = 0.0  #: in them, while a server changed its model


@dataclass
class WorkerStatistics:
    """What one worker has pushed and pulled, and what that has cost it."""

    pushes: int = 0  #: that have changed the model
    samples: int = 0  #: in them
    version: int = 0  #: of the model (server 0's), as this worker last pulled it
    bytes_sent: int = 0  #: to servers on other ranks
    bytes_received: int = 0  #: from them
    skipped: int = 0  #: pushes that were not made, since their numbers were not finite
    rows_pulled: int = 0  #: of tables, different ones in each minibatch
    rows_pushed: int = 0  #: likewise
    summed_staleness: int = 0  #: over its pushes
    largest_staleness: int = 0
    #: How many of its pushes met a model that had been changed so often since the one that they are
    #: of (on the server where that was most; 255 means 255 or more).
    staleness: Counter[int] = field(default_factory=Counter)
    seconds: Seconds = field(default_factory=Seconds)

    def count(self, staleness: int) -> None:
        self.staleness[min(staleness, LARGEST_COUNTED)] += 1
        self.summed_staleness += staleness
        self.largest_staleness = max(staleness, self.largest_staleness)

    @property
    def mean_staleness(self) -> float:
        pushes = self.staleness.total()
        return self.summed_staleness / pushes if pushes else 0.0

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            **{name: getattr(self, name) for name in COUNTED},
            "staleness": {str(s): n for s, n in sorted(self.staleness.items())},
            "mean_staleness": round(self.mean_staleness, 4),
            "seconds": {name: round(s, 4) for name, s in asdict(self.seconds).items()},
        }

    def packed(self) -> Array:
        """As a message holds it: int64 [`LENGTH`]."""
        counted = [getattr(self, name) for name in COUNTED]
        seconds = [round(NANO * s) for s in astuple(self.seconds)]
        histogram = [self.staleness[s] for s in range(LARGEST_COUNTED + 1)]
        return np.array(counted + seconds + histogram, np.int64)


COUNTED = tuple(f.name for f in fields(WorkerStatistics) if f.type == "int")
SECONDS = [f.name for f in fields(Seconds)]
WAIT = len(COUNTED) + SECONDS.index("wait")  #: its place, in nanoseconds
HISTOGRAM = len(COUNTED) + len(SECONDS)
LENGTH = HISTOGRAM + LARGEST_COUNTED + 1


def unpacked_statistics(numbers: Array) -> WorkerStatistics:
    """The inverse of `WorkerStatistics.packed`."""
    first, histogram = numbers[:HISTOGRAM].tolist(), numbers[HISTOGRAM:].tolist()
    return WorkerStatistics(
        **dict(zip(COUNTED, first, strict=False)),
        staleness=Counter({s: n for s, n in enumerate(histogram) if n}),
        seconds=Seconds(*(ns / NANO for ns in first[len(COUNTED) :])),
    )
