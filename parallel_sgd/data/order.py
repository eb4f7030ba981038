"""The order of the samples in an epoch, and the division of a minibatch among the ranks.

Data in groups of samples, such as files, have the order of `sources.groups`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..validation import require_memory

IndexArray = npt.NDArray[np.signedinteger[Any]]


def epoch_order(samples: int, seed: int, epoch: int, shuffle: bool) -> IndexArray:
    """Return the order of an epoch's samples: a permutation drawn from (seed, epoch) alone.

    The order depends neither on the rank nor on the number of ranks, so every rank computes the
    same order without communication. Memory: 8 bytes a sample. Local.

    Args:
        samples: number of samples.
        seed, epoch: seeds of the permutation.
        shuffle: False returns 0, 1, 2, …
    Returns:
        int [samples].
    Raises:
        UserError: the order would take more memory than the machine can have.
    """
    require_memory("the order of an epoch's samples", 8 * samples)
    if not shuffle:
        return np.arange(samples)
    return np.random.default_rng((seed, epoch)).permutation(samples)


def rank_slice(samples: int, rank: int, size: int) -> slice:
    """Return the contiguous part of a minibatch that belongs to one rank.

    The parts of all ranks, in rank order, form the minibatch. Their sizes differ by one at most,
    larger parts first; ranks beyond the number of samples get nothing. Local.

    >>> [rank_slice(5, rank, 3) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    least, more = divmod(samples, size)
    begin = rank * least + min(rank, more)
    return slice(begin, begin + least + (rank < more))
