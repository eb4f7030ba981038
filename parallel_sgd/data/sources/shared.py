"""Minibatches of a single data set shared by all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..fingerprint import require_same_data
from ..order import GROUPS_IN_USE, has_groups, order_of
from ..shares import rank_part
from ..validation import Array
from ..view import FeedView, LearnerView
from .minibatches import MinibatchSource, size_after


class Source(MinibatchSource):
    """Minibatches of a data set readable by every rank; each rank reads its part of each.

    Minibatch t of an epoch is the t-th run of `minibatch_size` samples in an order drawn from
    (seed, epoch) alone. Rank k gets the k-th of K contiguous parts; the sizes of the parts differ
    by at most 1, or are as `shares` says. So the ranks' parts, joined, are the minibatch that a
    single rank would get, whatever K; every sample is used exactly once an epoch (the last
    minibatch may be short); and all ranks take the same number of steps, some with an empty part if
    there are fewer samples than ranks.

    The position is a function of the learner's samples alone: a new source with the same arguments
    continues at the clock of a restored learner.

    If samples are best read in groups (`Dataset.groups`, of a Parquet file larger than memory), the
    groups are shuffled, and samples are shuffled among the groups in use at a time. A minibatch is
    then arranged by group, so that each rank reads only its part of the groups.

    Args:
        x: inputs [n, …], plain numbers in memory or memory-mapped; or without `y` a `Dataset` or
            any object with ``__len__`` and ``__getitem__`` whose items are pairs (x_i, y_i).
        y: targets [n, …], plain numbers: labels, or values of any sign.
        minibatch_size: samples of all ranks together in a minibatch, at least 1; or a mapping from
            samples seen by all ranks to sizes, ``{0: 64, 100_000: 256}``; or a function from
            samples seen to sizes.
        epochs: passes over the data, at least 1.
        seed: an integer of at least 0, the same on all ranks.
        shuffle: False takes the samples in their own order in every epoch.
        dtype: the float type of each minibatch's x, and of y if y holds floats; None keeps the
            stored type.
        classes: y holds labels, integers from 0 to classes - 1; any other label is refused when
            read. None: y holds any numbers; integers become int64. (The models here refuse labels
            out of range; your own model must do so.)
        start: the learner's samples before this source's first sample, if the learner has already
            been trained on another source.
        shares: each rank's share of a minibatch: a positive number for each rank that trains (only
            their ratios count); a mapping from samples to such numbers; or "measured": in
            proportion to the ranks' speeds, which they compare at intervals (``learner.report()``
            has the shares, with which a run can be repeated). None: equal shares.
    Raises:
        UserError: an argument is not as required, or there are no samples.

    At the first minibatch the ranks compare a few of their samples, and raise a SharedError if
    these differ. Minibatches that begin in a warm start are whole on every rank.

    Local; iteration is collective at the first minibatch. Memory: 8 bytes a sample for the order of
    the current epoch (32 bytes with groups), and one minibatch.
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
            with feed.dealing(self.shares) as weights:
                if feed.distributed:
                    local = minibatch[rank_part(len(minibatch), learner.comm, weights)]
                feed.announce(len(local), len(minibatch))
            yield self._read(local, learner)

    def _facts(self) -> dict[str, Any]:
        facts = super()._facts() | {"number of samples": len(self.dataset)}
        if has_groups(self.dataset):
            facts[GROUPS_IN_USE] = self.dataset.open_groups
        return facts

    def fingerprint(self, learner: LearnerView) -> str:
        """Return the fingerprint of the data (`require_same_data`), after `meet`. Local."""
        known: str = self._shared(learner)
        return known

    def _gather_shared(self, learner: LearnerView) -> str:
        return require_same_data(
            "data", self.dataset, learner.comm, dtype=self.dtype, classes=self.classes
        )
