"""Periods between two synchronizations of ranks."""

from __future__ import annotations

from fractions import Fraction

from ..errors import SharedError
from ..options import Options, Whole, option, options, values_of

WHOLE = Fraction(1)  #: the usual part of a period


@options
class Period(Options):
    """The length of a period of local training. A period ends with the minibatch that fills it."""

    sync_period: int | None = option(
        None,
        Whole(1),
        "samples of each rank in a period (on average, if ranks have different counts)",
    )
    sync_steps: int | None = option(None, Whole(1), "minibatches in a period")

    def __post_init__(self) -> None:
        self.require_at_most_one(*values_of(self))
        super().__post_init__()

    @property
    def given(self) -> bool:
        """True if any length is given."""
        return any(values_of(self).values())

    def samples_on(self, ranks: int) -> int | None:
        """Return the samples of all ranks in a period, or None if the period counts minibatches."""
        return None if self.sync_period is None else self.sync_period * ranks

    def ends(self, steps: int, samples: int, ranks: int, part: Fraction = WHOLE) -> bool:
        """Return True if a period ends after `steps` minibatches with `samples` in total.

        Args:
            steps: minibatches in the period so far.
            samples: of all ranks in the period so far.
            ranks: number of ranks.
            part: the part of a period after which it ends.
        """
        size = self.samples_on(ranks)
        if size is not None:
            return samples >= size * part
        assert self.sync_steps is not None
        return steps >= self.sync_steps * part


@options
class BlockPeriod(Period):
    """The length of a block of local steps. At most one of the three options is given."""

    block_samples: int | None = option(None, Whole(1), "samples of all ranks in a block")

    def samples_on(self, ranks: int) -> int | None:
        if self.block_samples is not None:
            return self.block_samples
        return None if self.sync_period is None else self.sync_period * ranks

    def length(self, samples: int, ranks: int) -> float:
        """Convert samples of all ranks to the samples this period counts."""
        return samples / ranks if self.sync_period is not None else samples

    def require_sample_of_each(self, ranks: int) -> None:
        """Check that every rank can have a sample in a block. Local.

        Raises:
            SharedError: a block is too short. The same on all ranks.
        """
        if self.block_samples is not None and self.block_samples < ranks:
            raise SharedError(
                f"block_samples={self.block_samples} must be at least the number of ranks, "
                f"{ranks}: the samples of all ranks are counted"
            )

    def require_minibatch(self, samples: int, ranks: int) -> None:
        """Check that a minibatch is not longer than a block. Local.

        Args:
            samples: of all ranks in the minibatch.
            ranks: number of ranks.
        Raises:
            SharedError: the minibatch is longer. The same on all ranks.
        """
        size = self.samples_on(ranks)
        if size is None or samples <= size:
            return
        if self.sync_period is None:
            raise SharedError(
                f"block_samples={self.block_samples} must be at least a minibatch of all ranks, "
                f"{samples} samples"
            )
        raise SharedError(
            f"sync_period={self.sync_period} must be at least a rank's part of a minibatch: "
            f"{samples} samples on {ranks} ranks"
        )
