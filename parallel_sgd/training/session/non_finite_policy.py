"""Options for losses and gradients with NaN or infinite values."""

from __future__ import annotations

from ...options import Choice, Options, Real, Whole, option, options
from ..non_finite import MOST_SKIPPED

KEEP_EVERY = 100
"""Default number of minibatches between two snapshots. Each snapshot costs a pass over memory."""


@options
class NotFinitePolicy(Options):
    """The treatment of a minibatch if its loss or gradient is not finite on any rank.

    "stop" ends training. "skip" skips the minibatch, as described at `Learner`'s `not_finite`.
    "reduce" lowers the learning rate for good, and restores the newest good state: all content of a
    checkpoint, kept in memory from time to time, including the place in the data. If training fails
    again before the next snapshot, the previous snapshot is restored. After too many failures in a
    row training ends.
    """

    not_finite: str = option(
        "stop",
        Choice("stop", "skip", "reduce"),
        "for a loss or a gradient that is not finite: stop training; skip the minibatch on all "
        "ranks; or reduce the learning rate, and restore a good state on all ranks",
    )
    not_finite_most: int = option(
        MOST_SKIPPED, Whole(), "most skips or reductions in a row; after more, training ends"
    )
    not_finite_factor: float = option(
        0.5, Real(positive=True, below=1), "with reduce: factor on the learning rate, each time"
    )
    not_finite_keep_every: int | None = option(
        None,
        Whole(1),
        f"with reduce: samples of all ranks between two snapshots in memory ({KEEP_EVERY} "
        "minibatches if not given)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        reduces = self.not_finite == "reduce"
        self.require_use("not_finite_factor", reduces, "not_finite='reduce'")
        self.require_use("not_finite_keep_every", reduces, "not_finite='reduce'")
