"""The ranks' shares of each minibatch: equal, given, or measured.

A minibatch of n samples is divided among K ranks with weights w by the method of the largest
remainder: rank k gets floor(n w_k / W) samples, W = sum_k w_k, and one more if its remainder is
among the largest, of equal remainders those of the first ranks. Equal weights give parts that
differ by one at most, larger parts first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from ..errors import UserError
from ..validation import kind_of, number, points, shown

MEASURED = "measured"
"""Shares in proportion to the ranks' measured speeds."""

Weights = tuple[int, ...]  #: of each rank, at least 1; only their ratios count
Shares = str | Mapping[int, Weights]
"""Checked shares: `MEASURED`, or the weights from each clock on."""


def checked_shares(shares: Any) -> Shares | None:
    """Return checked shares; None for equal shares.

    Args:
        shares: None, "measured", a positive number for each rank, or a mapping from samples of all
            ranks to such numbers, from 0 on.
    Raises:
        UserError: none of these.

    Local.

    >>> checked_shares([1, 0.5, 2])
    {0: (2, 1, 4)}
    """
    if shares is None or (isinstance(shares, str) and shares == MEASURED):
        return shares
    if isinstance(shares, Mapping):
        return dict(points("shares", shares, _weights))
    return {0: _weights("shares", shares)}


def read_shares(text: str) -> str | list[float]:
    """Read shares from text: "measured", or numbers with commas between them.

    Raises:
        UserError: neither.

    Local.
    """
    if text == MEASURED:
        return text
    try:
        return [float(share) for share in text.split(",")]
    except ValueError:
        raise UserError(f"shares={shown(text)} must be {MEASURED}, or numbers as 1,0.5") from None


def _weights(name: str, shares: Any) -> Weights:
    """Return whole numbers in the ratio of the given numbers, exactly."""
    if not isinstance(shares, Sequence | np.ndarray) or isinstance(shares, str | bytes):
        raise UserError(
            f"{name}={shown(shares)} must be 'measured', or a positive number for each rank: it is "
            f"{kind_of(shares)}"
        )
    exact = []
    for rank, share in enumerate(shares):
        value = number(f"{name}[{rank}]", share, 0)
        if value == 0:
            raise UserError(f"{name}[{rank}]={shown(share)} must be more than 0")
        exact.append(Fraction(value))
    if not exact:
        raise UserError(f"{name}={shown(shares)} must have a number for each rank")
    common = math.lcm(*(share.denominator for share in exact))
    whole = [int(share * common) for share in exact]
    return tuple(share // math.gcd(*whole) for share in whole)


def problem_with_shares(shares: Shares | None, comm: Any) -> str | None:
    """Return why shares do not fit the ranks, in one line; else None. Local.

    Args:
        comm: the ranks that train. After a failure the remaining ranks keep their shares.
    """
    if not isinstance(shares, Mapping) or getattr(comm, "generation", 0) > 0:
        return None
    for start, weights in shares.items():
        if len(weights) != comm.size:
            return (
                f"shares from {start} samples on must be {comm.size} numbers, one for each rank "
                f"that trains, but are {len(weights)}"
            )
    if [*comm.world_ranks] != [*range(comm.size)]:
        return 'shares need the servers on the last ranks: give role="auto"'
    return None


def shares_after(shares: Mapping[int, Weights], samples: int) -> Weights:
    """Return the weights of a minibatch that begins after so many samples. Local."""
    return shares[max(start for start in shares if start <= samples)]


def weights_of(world_ranks: Sequence[int], given: Weights) -> Weights:
    """Return the weights of the present ranks, given those of the ranks at the start.

    After failures each remaining rank keeps its weight. A rank that has joined gets the mean.

    Args:
        world_ranks: the numbers of the present ranks at the start.
        given: the weights of the ranks at the start.

    Local.

    >>> weights_of([0, 2, 3], (6, 1, 2))
    (6, 2, 3)
    """
    mean = max(1, round(sum(given) / len(given)))
    return tuple(given[rank] if rank < len(given) else mean for rank in world_ranks)


@lru_cache(maxsize=64)
def parts(samples: int, weights: Weights) -> tuple[int, ...]:
    """Return the ends of the ranks' contiguous parts of a minibatch: the part of rank k begins at
    entry k and ends at entry k + 1. Local.

    >>> parts(10, (3, 1, 1)), parts(5, (1, 1, 1))
    ((0, 6, 8, 10), (0, 2, 4, 5))
    """
    total = sum(weights)
    counts = [samples * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda rank: -(samples * weights[rank] % total))
    for rank in by_remainder[: samples - sum(counts)]:
        counts[rank] += 1
    return tuple(accumulate(counts, initial=0))


def rank_part(samples: int, comm: Any, weights: Weights | None) -> slice:
    """Return the part of a minibatch that belongs to a rank. Local.

    Args:
        comm: the ranks.
        weights: of the ranks; None: equal.
    """
    ends = parts(samples, weights or (1,) * comm.size)
    return slice(ends[comm.rank], ends[comm.rank + 1])
