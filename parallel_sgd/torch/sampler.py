"""Which samples of a data set are whose: for PyTorch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from ..data import Dataset, LearnerView
from ..data.groups import GROUPS_IN_USE, GroupedOrder, has_groups, order_of
from ..data.minibatches import (
    MinibatchSize,
    checked_minibatch_size,
    size_after,
    told_size,
)
from ..data.order import IndexArray, epoch_order, rank_slice
from ..errors import UserError
from ..validation import checked_seed, choice, integer, kind_of


class MinibatchSampler(Sampler[list[int]]):
    """Deals the samples of a data set that every rank can read out to the ranks, in minibatches.

        loader = DataLoader(dataset, batch_sampler=psgd.torch.sampler(dataset, learner, 256))
        for epoch in loader.batch_sampler.epochs(20):
            for x, y in loader:
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                learner.step(samples=len(x))

    The minibatches of all ranks are those of `parallel_sgd.data.Source`: minibatch t of an epoch is
    the t-th run of `minibatch_size` samples in an order drawn from (seed, epoch) alone, and rank k
    gets the k-th of its contiguous parts. So every sample is used once in an epoch, and the joint
    minibatches are the same, on any number of ranks. Where an epoch's last minibatch has fewer
    samples than there are ranks, a rank without one is given a sample all the same, since a
    DataLoader cannot give it nothing: the learner counts what it computes of that as nothing.

    Where the next minibatch begins is the learner's clock, ``learner.samples``, and nothing else:
    after `load_checkpoint` the loader goes on in the midst of an epoch. Minibatches may be fetched
    ahead by workers of the DataLoader.

    Args:
        dataset: with a length, or that length. Of a `parallel_sgd.data.Dataset` whose samples are
            best read in groups, the order is that of a `Source`.
        learner: which is trained on them.
        minibatch_size: samples of all ranks together in a minibatch, at least 1; or a mapping from
            the samples that all ranks have seen to such, ``{0: 64, 100_000: 256}``, or a function
            of them.
        seed: an integer of at least 0, the same on all ranks.
        shuffle: False takes the samples in their own order in every epoch.
        drop_last: leave out an epoch's last minibatch where it would be a shorter one (BatchNorm
            cannot train on a single sample).
        start: samples that the learner had seen before this sampler's first one, where it has
            already been trained on other data.
    Raises:
        UserError: on all ranks, if an argument is not as required on any, or differs.

    Creation is collective; for ranks that only serve there are no minibatches. Each pass is one
    epoch, or what the learner has not seen of it; all ranks make the same passes. In memory: 8
    bytes a sample.
    """

    def __init__(
        self,
        dataset: Sized | int,
        learner: LearnerView,
        minibatch_size: MinibatchSize,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        start: int = 0,
    ) -> None:
        self.learner = learner
        problem = None
        try:
            self.samples = integer("dataset", _length(dataset), 1)
            self.minibatch_size = checked_minibatch_size(minibatch_size)
            self.seed = checked_seed(seed)
            self.shuffle = choice("shuffle", shuffle, (True, False))
            self.start = integer("start", start, 0)
            self.drop_last = choice("drop_last", drop_last, (True, False))
            self._grouped = None
            if isinstance(dataset, Dataset) and has_groups(dataset):
                self._grouped = dataset
            self.samples_per_epoch = self.samples
            if drop_last:  # of minibatches of one size
                size = integer("minibatch_size", minibatch_size, 1, most=self.samples)
                self.samples_per_epoch -= self.samples % size
        except UserError as error:
            problem = str(error)
        if getattr(learner, "serves", False):
            return
        learner.comm.raise_together(problem)
        facts = {
            "length of the dataset": self.samples,
            "minibatch_size": told_size(self.minibatch_size),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "start": self.start,
        }
        if self._grouped is not None:
            facts[GROUPS_IN_USE] = self._grouped.open_groups
        learner.comm.require_agreement(facts)

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs that the learner has not finished, up to `count`: one pass over
        the DataLoader for each. Local."""
        integer("epochs", count, 1)
        if getattr(self.learner, "serves", False):
            return
        number = -1
        while number < count - 1:
            number = max(number + 1, self._epoch_at(self.learner.samples))
            if number < count:
                yield number

    def __len__(self) -> int:
        """Minibatches of the epoch that the learner stands in."""
        end, count = self.samples_per_epoch, 0
        begin = self._epoch_at(self.learner.samples) * end + self.start
        seen = 0
        while seen < end:
            seen, count = seen + size_after(self.minibatch_size, begin + seen), count + 1
        return count

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's samples of each minibatch, to the end of the epoch that the learner stands
        in."""
        learner = self.learner
        if getattr(learner, "serves", False):
            return
        with learner.feed() as feed:
            if feed.samples < self.start:
                learner.fail(
                    f"start={self.start} must be at most the {feed.samples} samples that the "
                    "learner has seen"
                )
            number = self._epoch_at(feed.samples)
            order = self._order(number)
            seen = feed.samples - self.start - number * self.samples_per_epoch
            while seen < self.samples_per_epoch:
                end = min(
                    seen + size_after(self.minibatch_size, feed.samples), self.samples_per_epoch
                )
                minibatch, seen = order[seen:end], end
                own = minibatch
                if feed.distributed:
                    part = rank_slice(len(minibatch), learner.comm.rank, learner.comm.size)
                    own = minibatch[part]
                feed.announce(len(own), len(minibatch))
                yield (own if len(own) else minibatch[-1:]).tolist()

    def _order(self, number: int) -> IndexArray | GroupedOrder:
        if self._grouped is None:
            return epoch_order(self.samples, self.seed, number, self.shuffle)
        return order_of(self._grouped, self.seed, number, self.shuffle)

    def _epoch_at(self, samples: int) -> int:
        return max(0, samples - self.start) // self.samples_per_epoch


def _length(dataset: Any) -> Any:
    if isinstance(dataset, int):
        return dataset
    try:
        return len(dataset)
    except TypeError:
        raise UserError(
            f"dataset must have a length, or be one: it is {kind_of(dataset)}; for a stream give "
            "each rank its own, and end with learner.run_dry()"
        ) from None
