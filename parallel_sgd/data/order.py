"""In which order the samples of an epoch are taken, and which of them are whose."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..validation import require_memory

IndexArray = npt.NDArray[np.signedinteger[Any]]


def epoch_order(samples: int, seed: int, epoch: int, shuffle: bool) -> IndexArray:
    """Return the order of an epoch's samples: a permutation drawn from (seed, epoch) alone.

    It knows neither rank nor number of ranks, so that every rank finds the same one without
    communication. Takes 8 bytes a sample. Local.

    Raises:
        UserError: no machine like this one has as much memory.
    """
    require_memory("the order of an epoch's samples", 8 * samples)
    if not shuffle:
        return np.arange(samples)
    return np.random.default_rng((seed, epoch)).permutation(samples)


def rank_slice(samples: int, rank: int, size: int) -> slice:
    """Return the contiguous part of a minibatch that belongs to one rank.

    The parts of all ranks, in rank order, are the minibatch; their sizes differ by one at most,
    the larger ones first, so that ranks beyond the number of samples get nothing. Local.

    >>> [rank_slice(5, rank, 3) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    least, more = divmod(samples, size)
    begin = rank * least + min(rank, more)
    return slice(begin, begin + least + (rank < more))
