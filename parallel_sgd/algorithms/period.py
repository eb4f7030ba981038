"""When ranks that go by themselves for a while synchronize."""

from __future__ import annotations

from ..errors import SharedError
from ..options import Options, Whole, option, options, values_of


@options
class Period(Options):
    """How long a rank goes by itself. It ends with the minibatch that fills it."""

    sync_period: int | None = option(
        None, Whole(1), "samples of each rank in a period (on average, where they are uneven)"
    )
    sync_steps: int | None = option(None, Whole(1), "minibatches in a period")

    def __post_init__(self) -> None:
        self.require_at_most_one(*values_of(self))
        super().__post_init__()

    @property
    def given(self) -> bool:
        """Whether any length is."""
        return any(values_of(self).values())

    def samples_on(self, ranks: int) -> int | None:
        """Samples of all ranks in a period; None where it is counted in minibatches."""
        return None if self.sync_period is None else self.sync_period * ranks

    def ends(self, steps: int, samples: int, ranks: int) -> bool:
        """Whether a period ends with so many minibatches, and samples of all ranks."""
        size = self.samples_on(ranks)
        if size is not None:
            return samples >= size
        assert self.sync_steps is not None
        return steps >= self.sync_steps


@options
class BlockPeriod(Period):
    """The length of a block of local steps. At most one of the three is given."""

    block_samples: int | None = option(None, Whole(1), "samples of all ranks in a block")

    def samples_on(self, ranks: int) -> int | None:
        if self.block_samples is not None:
            return self.block_samples
        return None if self.sync_period is None else self.sync_period * ranks

    def length(self, samples: int, ranks: int) -> float:
        """So many samples of all ranks as this period counts them."""
        return samples / ranks if self.sync_period is not None else samples

    def require_sample_of_each(self, ranks: int) -> None:
        """See that every rank can have a sample in a block. Local.

        Raises:
            SharedError: it cannot; alike on all ranks.
        """
        if self.block_samples is not None and self.block_samples < ranks:
            raise SharedError(
                f"block_samples={self.block_samples} must be at least the number of ranks, "
                f"{ranks}: they are samples of all ranks"
            )

    def require_minibatch(self, samples: int, ranks: int) -> None:
        """See that a minibatch of so many samples of all ranks is no longer than a block. Local.

        Raises:
            SharedError: it is; alike on all ranks.
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
