"""Minibatches of one data set that all ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..fingerprint import require_same_data
from ..order import rank_slice
from ..validation import Array
from ..view import FeedView, LearnerView
from .groups import GROUPS_IN_USE, has_groups, order_of
from .minibatches import MinibatchSource, size_after


class Source(MinibatchSource):
    """Minibatches of a data set that every rank can read; each rank reads its part of each.

    Minibatch t of an epoch is the t-th run of `minibatch_size` samples in an order drawn from
    (seed, epoch) alone; rank k gets the k-th of its K contiguous parts, whose sizes differ by one
    at most. So the ranks' parts, joined, are the minibatch that one rank alone would get, whatever
    K; every sample is used exactly once an epoch (the last minibatch may be short); and all ranks
    take the same number of steps, with nothing in hand where there are fewer samples than ranks.

    The position is a function of the learner's samples and of nothing else: a new source of the
    same arguments goes on wherever a restored learner stands.

    Where samples are best read in groups (`Dataset.groups`, of a Parquet file larger than memory),
    the groups are shuffled, and samples among those that are in use at a time. A minibatch is then
    arranged by group, so that each rank reads its part of the groups.

    Args:
        x: inputs [n, …], plain numbers in memory or memory-mapped; or without `y` a `Dataset` or
            any object with ``__len__`` and ``__getitem__`` whose items are pairs (x_i, y_i).
        y: what is to be learned [n, …], plain numbers: labels, or values of any sign.
        minibatch_size: samples of all ranks together in a minibatch, at least 1; or a mapping from
            the samples that all ranks have seen to such, ``{0: 64, 100_000: 256}``, or a function
            of them.
        epochs: passes over the data, at least 1.
        seed: an integer of at least 0, the same on all ranks.
        shuffle: False takes the samples in their own order in every epoch.
        dtype: the float type that each minibatch's x is converted to, and its y where that holds
            floats; None keeps the data's own.
        classes: y holds labels, integers from 0 to classes - 1: any other is refused as it is
            read. None: y holds any numbers, of which integers become int64. (The models here refuse
            labels that are not theirs; a model of your own must.)
        start: samples that the learner had seen before this source's first one, where it has
            already been trained on another.
    Raises:
        UserError: an argument is not as required, or there are no samples.

    The ranks compare a few of their samples as they meet, and raise a SharedError where these
    differ. Minibatches that begin in a warm start are whole on every rank.

    Local. In memory: 8 bytes a sample for the order of the current epoch, and one minibatch.
    """

    _may_be_empty = False

    @property
    def samples_per_epoch(self) -> int:
        """Samples of all ranks in an epoch."""
        return len(self.dataset)

    def _samples_of_epoch(self, learner: LearnerView) -> int:
        return self.samples_per_epoch

    def _epoch(
        self, number: int, feed: FeedView, learner: LearnerView
    ) -> Iterator[tuple[Array, Array]]:
        samples = self.samples_per_epoch
        order = order_of(self.dataset, self.seed, number, self.shuffle)
        seen = self._seen_of_epoch(number, samples, feed, learner)
        while seen < samples:
            minibatch = order[seen : seen + size_after(self.minibatch_size, feed.samples)]
            seen += len(minibatch)
            local = minibatch
            if feed.distributed:
                local = minibatch[rank_slice(len(minibatch), learner.comm.rank, learner.comm.size)]
            feed.announce(len(local), len(minibatch))
            yield self._read(local, learner)

    def _facts(self) -> dict[str, Any]:
        facts = super()._facts() | {"number of samples": len(self.dataset)}
        if has_groups(self.dataset):
            facts[GROUPS_IN_USE] = self.dataset.open_groups
        return facts

    def fingerprint(self, learner: LearnerView) -> str:
        """What tells the data from others, once it has met the learner. Local."""
        known: str = self._shared(learner)
        return known

    def _gather_shared(self, learner: LearnerView) -> str:
        return require_same_data(
            "data", self.dataset, learner.comm, dtype=self.dtype, classes=self.classes
        )
