"""A ramp of the learning rate over a worker's minibatches."""

from __future__ import annotations

from ..options import Choice, Options, Real, Whole, option, options


@options
class Ramp(Options):
    """The factor of the learning rate after s minibatches of a worker, at most 1.

        staircase   a (⌊s / m⌋ + 1)
        linear      a + (1 - a) s / m           a = ramp_coefficient, m = ramp_minibatches

    Source: CNTK's DataParallelASGD.
    """

    ramp_coefficient: float = option(
        0.1,
        Real(most=1, positive=True),
        "with ramp_minibatches: the fraction of the learning rate at the start of training",
    )
    ramp_minibatches: int = option(
        0,
        Whole(),
        "minibatches of a worker after which the learning rate rises by the same fraction again "
        "(staircase), or is complete (linear); 0: complete from the start",
    )
    ramp: str = option(
        "staircase",
        Choice("staircase", "linear"),
        "after s of m = ramp_minibatches, with a = ramp_coefficient, the factor is "
        "min(1, a (floor(s/m) + 1)), or min(1, a + (1 - a) s/m)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ramp_coefficient", "ramp"):
            self.require_use(name, self.ramp_minibatches > 0, "ramp_minibatches")

    def factor(self, minibatches: int) -> float:
        """Return the factor of the learning rate after a number of minibatches of a worker."""
        a, m = self.ramp_coefficient, self.ramp_minibatches
        if m == 0:
            return 1.0
        if self.ramp == "linear":
            return min(1.0, a + (1 - a) * minibatches / m)
        return min(1.0, a * (minibatches // m + 1))
