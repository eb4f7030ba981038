"""A source for ranks with separate data: each rank's samples are known to this rank only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ...validation import shown
from ..order import IndexArray, order_of
from ..shares import MEASURED, parts
from ..validation import Array
from ..view import CommunicatorView, FeedView, LearnerView
from .minibatches import MinibatchSource


class RankSource(MinibatchSource):
    """Minibatches composed of a part from each rank's separate data.

    Rank k takes its share of `minibatch_size` from its own samples, in an order drawn from (seed,
    epoch). A rank that has used up its samples yields empty minibatches and stays in lockstep,
    until the epoch ends on all ranks with the last sample of the longest data. A rank may have no
    samples at all.

    The ranks exchange their numbers of samples once, at the first minibatch. After that the
    position is a function of the learner's samples alone: a new source with the same arguments
    continues at the clock of a restored learner.

    A warm start needs the same minibatch on every rank and is impossible here.

    Args:
        x: this rank's inputs [n, …], n from 0, plain numbers in memory or memory-mapped; or without
            `y` a `Dataset` or any object whose items are pairs (x_i, y_i).
        y: this rank's targets [n, …]: labels, or values of any sign.
        minibatch_size: samples of all ranks together in a minibatch while every rank has samples
            left; at least the number of ranks.
        epochs, seed, shuffle, dtype, classes, start: as for `Source`.
        shares: a positive number for each rank. None: equal shares, up to one sample.
    Raises:
        UserError: an argument is not as required.

    Local; iteration is collective at the first minibatch (`minibatches`).
    """

    @property
    def _size(self) -> int:
        assert isinstance(self.minibatch_size, int)  # see `_problem`
        return self.minibatch_size

    def _samples_of_epoch(self, learner: LearnerView) -> int:
        totals, _ = self._shared(learner)
        return int(sum(totals))

    def _epoch(
        self, number: int, feed: FeedView, learner: LearnerView
    ) -> Iterator[tuple[Array, Array]]:
        totals, local = self._shared(learner)
        begins = np.concatenate([[0], totals.cumsum()])
        samples = int(begins[-1])
        seen = self._seen_of_epoch(number, samples, feed, learner)
        first = int(np.searchsorted(begins, seen))
        if begins[first] != seen:
            learner.fail(
                f"minibatch_size={self._size}: no minibatch of these ranks begins after "
                f"{feed.samples} samples"
            )
        order = order_of(self.dataset, self.seed, number, self.shuffle)
        for step in range(first, len(totals)):
            minibatch = order[step * local : (step + 1) * local]
            feed.announce(len(minibatch), int(totals[step]))
            yield self._read(minibatch, learner)

    def _gather_shared(self, learner: LearnerView) -> tuple[IndexArray, int]:
        """Return samples of all ranks in each minibatch of an epoch, and this rank's full share."""
        lengths = learner.comm.allgather_object(len(self.dataset))
        counts = self._counts(learner.comm)
        steps = np.arange(max(-(-n // m) for n, m in zip(lengths, counts, strict=True)))
        totals = np.zeros_like(steps)
        for n, m in zip(lengths, counts, strict=True):
            totals += np.clip(n - steps * m, 0, m)
        return totals, counts[learner.comm.rank]

    def _counts(self, comm: CommunicatorView) -> list[int]:
        """Return each rank's samples in a full minibatch. Local."""
        given = self.shares[0] if isinstance(self.shares, Mapping) else (1,) * comm.size
        counts: list[int] = np.diff(parts(self._size, given)).tolist()
        return counts

    def _problem(self, learner: LearnerView) -> str | None:
        size, minibatch_size = learner.comm.size, self.minibatch_size
        if not isinstance(minibatch_size, int) or minibatch_size < size:
            return (
                f"minibatch_size={shown(minibatch_size)} must be one number, at least the "
                f"number of ranks, {size}, if each rank has separate data"
            )
        if learner.comm.fault_tolerant:
            return (
                "each rank has separate data, with which no other rank can continue after a "
                "failure: run without --survive, or train with parameter servers"
            )
        if not learner.distributed:
            return (
                "distributed_after must be 0 if each rank has separate data: a warm start "
                "needs the same minibatch on every rank"
            )
        if self.shares == MEASURED or (self.shares is not None and len(self.shares) > 1):
            return (
                f"shares={shown(self.shares)} must be one number for each rank, if each rank has "
                "separate data"
            )
        if min(self._counts(learner.comm)) == 0:
            return f"minibatch_size={minibatch_size} must have a sample for each rank's share"
        return None
