"""The order of the samples in an epoch.

Samples that are best read in groups, such as parts of a file, stay together in the order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..validation import require_memory
from .dataset import Dataset

IndexArray = npt.NDArray[np.signedinteger[Any]]
GROUPS_IN_USE = "groups of samples in use at a time"  #: name of this fact in the ranks' comparison


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


class GroupedOrder:
    """An order that keeps the samples of a group together; a slice of the order is a minibatch.

    The groups are shuffled and taken `together` at a time, and their samples are shuffled among
    each other. A slice is arranged by group. So a rank's contiguous part of a slice has few groups,
    and its parts of the following slices have the same groups.

    Args:
        groups: int [n], the group of each sample.
        together: groups that are shuffled among each other, at least 1.
        seed, epoch: the order depends on these and the other arguments alone.

    Memory: 32 bytes a sample during construction, then 16. Local.

    >>> order = GroupedOrder(np.array([0, 0, 0, 1, 1, 1, 2, 2, 2]), together=1, seed=0, epoch=0)
    >>> [order[begin : begin + 3].tolist() for begin in (0, 3, 6)]
    [[4, 3, 5], [6, 7, 8], [2, 0, 1]]
    """

    def __init__(self, groups: IndexArray, together: int, seed: int, epoch: int) -> None:
        random = np.random.default_rng((seed, epoch))
        place = random.permutation(int(groups.max(initial=-1)) + 1)  # by group, in the order
        order = random.permutation(len(groups))
        places = place[groups[order]]
        windows = np.argsort(places // together, kind="stable")
        self._order, self._places = order[windows], places[windows]

    def __getitem__(self, part: slice) -> IndexArray:
        arranged = np.argsort(self._places[part], kind="stable")
        minibatch: IndexArray = self._order[part][arranged]
        return minibatch


def order_of(dataset: Dataset, seed: int, epoch: int, shuffle: bool) -> IndexArray | GroupedOrder:
    """Return the order of an epoch's samples; slices of the order are minibatches. Local.

    Args:
        seed, epoch, shuffle: as for `epoch_order`.
    Returns:
        A `GroupedOrder` if the data set has groups and `shuffle` is True; else the `epoch_order`.
    Raises:
        UserError: the order would take more memory than the machine can have.
    """
    if not shuffle or not has_groups(dataset):
        return epoch_order(len(dataset), seed, epoch, shuffle)
    require_memory("the order of an epoch's samples", 32 * len(dataset))
    groups = dataset.groups(np.arange(len(dataset)))
    assert groups is not None
    return GroupedOrder(groups, dataset.open_groups, seed, epoch)


def has_groups(dataset: Dataset) -> bool:
    """Return True if a data set is best read in groups (`Dataset.groups`). Local."""
    return dataset.groups(np.zeros(0, np.int64)) is not None
