"""The second moment of gradients before their quantization by an entropy code.

Adam divides by the root of the mean square of each value. An entropy code sends a small value
seldom, and then as a whole step: the mean is right, but the mean square may be 50 times too large.
The messages do not contain this factor, so the ranks measure it:

    projection = sum over a group of 64 of sign * g,   with random signs, the same on all ranks

Projections of the ranks add up to the projection of the summed gradient. Its square is, on average
over the signs, the sum of the squares in the group. This is measured in each of the first steps,
because Adam's later course depends on its beginning, and seldom after that.

Source: the sketch is from Alon, Matias and Szegedy, STOC 1996, section 2.2. Its use here is ours:
docs/algorithms.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .errors import UserError
from .kernels.reference import MOMENT_GROUP

Array = Any  #: a NumPy or CuPy array

PROJECTED_UNTIL = 64
"""Gradients are projected in each of the first steps, up to this one."""
PROJECTED_EVERY = 32
"""Interval of later steps with projections."""

LARGEST_MOVE = 8.0
"""Most learning rates by which Adam moves a value with a quantized gradient."""
HELD = 32
"""First steps without a correction. In as many steps after that, the correction reaches two
thirds."""
LARGEST_RATIO = 1e6
"""Limit of a group's ratio of the mean square before quantization to v: v may be almost 0."""
TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class Quantized(NamedTuple):
    """Facts for an optimizer about a gradient quantized by an entropy code.

    Attributes:
        places: of the quantized values.
        projections: [groups] of the gradient before quantization, summed like the gradient; None in
            steps without projections.
    """

    places: tuple[slice, ...]
    projections: Array | None


def is_projected(step: int) -> bool:
    """Return True if gradients are projected in a step; the first step has the number 1."""
    return step <= PROJECTED_UNTIL or step % PROJECTED_EVERY == 0


def groups_of(values: int) -> int:
    """Return the number of groups for `values` values."""
    return -(-values // MOMENT_GROUP)


def learn(
    correction: dict[str, Array],
    projections: Array,
    sums: Array,
    values: int,
    step: int,
    beta2: float,
) -> None:
    """Update Adam's correction after a step with projections: v becomes slope * v + shift.

        squares <- squares + w * (projection^2 - squares)
        a       <- 0 in the first 32 steps, then 1 - e^(-(step - 32) / 32)
        c       <- (squares / sum of v)^a,  or without the power where v is too small
        slope   <- c * (1 - a / 2)
        shift   <- c * a / 2 * (sum of v) / 64

    So in the end the mean over a group is the mean square before quantization. Half of it is
    distributed in proportion to v, half evenly, because v of a seldom sent value is imprecise. In
    the first steps Adam has no correction, while the squares are measured: with a correction from
    the first step on, a transformer's loss began badly in some runs, and never caught up.

    Args:
        correction: squares, slopes and shifts by name, [groups]; changed. Empty before the first
            projections.
        projections: [groups], of the mean gradient.
        sums: [groups], of v.
        values: in all groups; the last group may have fewer than 64.
        step: its number.
        beta2: of v; w = 1 - beta2^d if the last projections are d steps old.

    Local. Cost: some passes over the groups.
    """
    # If training has begun with other bits, v was right until now.
    squares = correction.get("squares", sums if step > 1 else np.zeros_like(sums))
    earlier = step - 1
    if correction:
        earlier = max(min(earlier, PROJECTED_UNTIL), step - PROJECTED_EVERY)
    weight = 1 - beta2 ** (step - earlier)
    share = 1 - math.exp(-max(step - HELD, 0) / HELD)
    sums = np.minimum(sums, LARGEST)
    with np.errstate(over="ignore"):
        squares = np.fmin(squares + weight * (projections**2 - squares), LARGEST)  # NaN, too
        ratios = np.where(sums > 0, squares / np.maximum(sums, TINY), 2)
        ratios = np.clip(ratios, TINY, LARGEST_RATIO)
        ratios = np.minimum(ratios, 1) ** share * np.maximum(ratios, 1)
        shifts = ratios * (share / 2 / MOMENT_GROUP) * sums
        shifts[-1:] *= MOMENT_GROUP / (values - MOMENT_GROUP * (len(squares) - 1))
    correction["squares"] = squares
    correction["slopes"] = ratios * (1 - share / 2)
    correction["shifts"] = np.minimum(shifts, LARGEST)


def require_correction(saved: Mapping[str, Array], like: Array | None) -> None:
    """Check that a saved correction is empty, or fits a vector like `like`.

    Raises:
        UserError: the correction does not fit.
    """
    if not saved:
        return
    values, dtype = (0, np.dtype(np.float32)) if like is None else (like.size, like.dtype)
    had = {name: f"{vector.dtype} {list(vector.shape)}" for name, vector in saved.items()}
    has = dict.fromkeys(("squares", "slopes", "shifts"), f"{dtype} [{groups_of(values)}]")
    if had != has:
        raise UserError(f"has optimizer.correction of {had}, which must be {has}, or nothing")
    for name, vector in saved.items():
        if not (vector >= 0).all() or not np.isfinite(vector).all():
            raise UserError(f"has optimizer.correction.{name} with values below 0 or not finite")
