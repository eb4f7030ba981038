"""A warning about blocks that are too short for the local momentum that each of them resets."""

from __future__ import annotations

import math

from .outer import OuterStep
from .period import BlockPeriod

USUAL_MOMENTUM = 0.9
"""Up to this momentum short blocks learned well in our experiments, so nothing is said of them."""


def reset_warning(
    name: str, outer: OuterStep, period: BlockPeriod, momentum: float, samples: int, ranks: int
) -> str | None:
    """Return the text of a warning if blocks are shorter than the momentum's time constant, and
    each block begins with a momentum of zeros; otherwise None. Local; the same on all ranks.

    A block of H steps from a momentum m of zeros moves the model by 1 - (1 - m^H) m / (H (1 - m))
    of a constant gradient's full movement: by 1/e if H is the time constant, -1 / ln m. In samples
    the rule is N >= τK, for a block of N samples on K ranks and a time constant of τ samples.

    Args:
        name: of the algorithm.
        momentum: of a local step.
        samples: of all ranks in a minibatch.
        ranks: number of ranks.
    """
    if outer.inner_state != "zero" or not USUAL_MOMENTUM < momentum < 1:
        return None
    size = period.samples_on(ranks)
    steps = period.sync_steps if size is None else math.ceil(size / samples)
    needed = -1 / math.log(momentum)
    assert steps is not None
    if steps >= needed:
        return None
    if period.sync_steps is not None:
        enough = f"sync_steps={math.ceil(needed)}"
    elif period.sync_period is not None:
        enough = f"sync_period={math.ceil(needed * samples / ranks)}"
    else:
        enough = f"block_samples={math.ceil(needed * samples)}"
    reset, kept = outer.reset_options
    return (
        f"{name}: {reset} zeroes the local momentum of {momentum:.4g} after every block of {steps} "
        f"steps, but this momentum takes about {math.ceil(needed)} steps to build up: give {kept}, "
        f"a smaller momentum, or {enough} or more"
    )
