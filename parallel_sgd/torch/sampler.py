"""A batch sampler for PyTorch's DataLoader that splits minibatches across ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sized
from typing import Any, Self, cast

from torch.utils.data import Sampler

from ..data import Dataset, LearnerView
from ..data.order import (
    GROUPS_IN_USE,
    GroupedOrder,
    IndexArray,
    epoch_order,
    has_groups,
    order_of,
)
from ..data.shares import MEASURED, checked_shares, problem_with_shares, rank_part
from ..data.sources.minibatches import (
    MinibatchSize,
    checked_minibatch_size,
    size_after,
    size_summary,
)
from ..data.view import Agreement, FeedView, RolledBack, require_learner
from ..errors import UserError
from ..training.recovery.base import NoRecovery, Recovery
from ..validation import checked_seed, choice, integer, kind_of
from .loader_seed import LoaderSeed


class MinibatchSampler(Sampler[list[int]]):
    """Split a data set, readable by every rank, into minibatches for the ranks.

        loader = DataLoader(dataset, batch_sampler=psgd.torch.sampler(dataset, learner, 256))
        for epoch in loader.batch_sampler.epochs(20):
            for x, y in loader:
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                learner.step(samples=len(x))

    The minibatches are those of `parallel_sgd.data.Source`: minibatch t of an epoch is the t-th run
    of `minibatch_size` samples in an order drawn from (seed, epoch) alone, and rank k gets the k-th
    of its contiguous parts. So every sample is used once per epoch, and the joint minibatches are
    the same for any number of ranks. If an epoch's last minibatch has fewer samples than there are
    ranks, a rank without a sample still gets one as a filler, since a DataLoader cannot return an
    empty minibatch. The learner ignores the filler's gradient.

    The position in the data is the learner's clock, ``learner.samples``, and nothing else: after
    `load_checkpoint` the loader continues within the epoch. Workers of the DataLoader may prefetch
    minibatches.

    Each epoch takes a single number from PyTorch's generator, however many passes a DataLoader
    begins in the epoch, so training with dropout resumes bit for bit. Random numbers drawn by a
    data set in DataLoader workers do not resume: within an epoch, the workers of a resumed run have
    another seed.

    Args:
        dataset: an object with a length, or that length. For a `parallel_sgd.data.Dataset` best
            read in groups of samples, the order is that of a `Source`.
        learner: the learner that trains on the samples.
        minibatch_size: samples of all ranks in a minibatch, at least 1; or a mapping from the clock
            (samples of all ranks so far) to sizes, ``{0: 64, 100_000: 256}``, or a function of the
            clock.
        seed: an integer of at least 0, the same on all ranks.
        shuffle: False keeps the samples in their own order in every epoch.
        drop_last: drop an epoch's last minibatch if shorter than the rest (BatchNorm cannot train
            on a single sample).
        start: the learner's clock at the beginning of this sampler's first epoch, for a learner
            already trained on different data.
        shares: each rank's share of a minibatch: numbers, or "measured": see `Source`.
    Raises:
        UserError: on all ranks, if an argument is not as required on any rank, or differs.

    Creation is collective. Ranks that only serve get no minibatches. Each pass is an epoch, or the
    rest of an epoch; all ranks make the same passes. Memory: 8 bytes per sample.
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
        shares: Any = None,
    ) -> None:
        require_learner(learner)
        self.learner = learner
        problem = None
        try:
            self.samples = integer("dataset", _length(dataset), 1)
            self.minibatch_size = checked_minibatch_size(minibatch_size)
            self.seed = checked_seed(seed)
            self.shuffle = choice("shuffle", shuffle, (True, False))
            self.start = integer("start", start, 0)
            self.shares = checked_shares(shares)
            self.drop_last = choice("drop_last", drop_last, (True, False))
            self._grouped = None
            if isinstance(dataset, Dataset) and has_groups(dataset):
                self._grouped = dataset
            self.samples_per_epoch = self.samples
            if drop_last:  # requires minibatches of equal size
                size = integer("minibatch_size", minibatch_size, 1, most=self.samples)
                self.samples_per_epoch -= self.samples % size
        except UserError as error:
            problem = str(error)
        if getattr(learner, "serves", False):
            return
        self._problem = problem
        self._agreement: Agreement | None = None
        model = getattr(learner, "model_state", None)  # holds the generators' states in checkpoints
        self._seed = None if model is None else LoaderSeed(model.generators().values())
        if not self._recovery.ranks_may_change:
            self._agree()

    @property
    def _recovery(self) -> Recovery:
        return getattr(self.learner, "recovery", None) or NoRecovery()

    def _agree(self) -> None:
        """Check that the arguments agree on all ranks. Collective, at the beginning and again after
        ranks have joined.
        """
        comm = self.learner.comm
        if self._agreement is not None and self._agreement.holds(self.learner):
            return
        comm.raise_together(self._problem or problem_with_shares(self.shares, comm))
        facts = {
            "length of the dataset": self.samples,
            "minibatch_size": size_summary(self.minibatch_size),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "start": self.start,
            "shares": self.shares,
        }
        if self._grouped is not None:
            facts[GROUPS_IN_USE] = self._grouped.open_groups
        comm.require_agreement(facts)
        if self.shares == MEASURED:
            self.learner.shares.measure()
        self._agreement = Agreement(self.learner)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the number of each unfinished epoch below `count`: make a pass over the DataLoader
        for each.

        If training rolls back into an epoch after its pass has ended, the epoch is yielded again.
        Collective if the ranks are fault-tolerant; otherwise local.
        """
        integer("epochs", count, 1)
        if getattr(self.learner, "serves", False):
            return
        number = -1
        while number < count - 1:
            number = max(number + 1, self._epoch_at(self.learner.samples))
            if number == count:
                return
            yield from self._whole_epoch(number)

    def _whole_epoch(self, number: int) -> Iterator[int]:
        """Yield an epoch's number; again if ranks have failed and part of the epoch is left."""
        while True:
            before = self._recovery.rollbacks
            yield number
            # If a rank fails here, other ranks come to this end again: all pass it together.
            while not self._recovery.end_pass() and self._epoch_at(self.learner.samples) > number:
                pass
            if self._recovery.rollbacks == before or self._epoch_at(self.learner.samples) > number:
                return

    def __len__(self) -> int:
        """Return the number of minibatches in the learner's present epoch."""
        end, count = self.samples_per_epoch, 0
        begin = self._epoch_at(self.learner.samples) * end + self.start
        seen = 0
        while seen < end:
            seen, count = seen + size_after(self.minibatch_size, begin + seen), count + 1
        return count

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's sample indexes of each minibatch, up to the end of the present
        epoch.
        """
        if getattr(self.learner, "serves", False):
            return iter(())
        if self._seed is not None:
            self._seed.begin()
        return ResumableIterator(self._pass())

    def _pass(self) -> Iterator[list[int] | None]:
        """Yield the minibatches of a pass; None while no minibatch is available."""
        learner = self.learner
        self._agree_after_failure()
        with learner.feed() as feed:
            if feed.samples < self.start:
                learner.fail(
                    f"start={self.start} must be at most the {feed.samples} samples that the "
                    "learner has seen"
                )
            begin = self._epoch_at(feed.samples) * self.samples_per_epoch
            end = begin + self.samples_per_epoch
            self._align_seed(self.start + begin, feed.samples)
            while True:
                try:
                    last = yield from self._minibatches(feed, end)
                    if feed.may_roll_back:
                        yield from self._until_trained(feed, last)
                        feed.complete()
                    return
                except RolledBack:
                    self._agree_after_failure()
                    feed.resume()

    def _align_seed(self, begin: int, samples: int) -> None:
        """Make the epoch take a single number from PyTorch's generators.

        Args:
            begin: the clock at the beginning of the epoch.
            samples: the clock at the beginning of the pass.
        """
        if self._seed is not None:
            state = cast(Any, self.learner).model_state
            self._seed.settle(counted=samples > begin or state.epoch == begin)
            state.epoch = begin

    def _minibatches(self, feed: FeedView, end: int) -> Generator[list[int], None, list[int]]:
        """Yield the minibatches from the learner's clock to `end`. Return the last minibatch."""
        position, number, indexes = feed.samples - self.start, -1, list[int]()
        while position < end:
            if number != position // self.samples_per_epoch:
                number = position // self.samples_per_epoch
                order, begin = self._order(number), number * self.samples_per_epoch
            seen = position - begin
            stop = min(seen + size_after(self.minibatch_size, feed.samples), self.samples_per_epoch)
            minibatch, position = order[seen:stop], begin + stop
            own = minibatch
            with feed.dealing(self.shares) as weights:
                if feed.distributed:
                    own = minibatch[rank_part(len(minibatch), self.learner.comm, weights)]
                feed.announce(len(own), len(minibatch))
            indexes = (own if len(own) else minibatch[-1:]).tolist()
            yield indexes
        return indexes

    def _until_trained(self, feed: FeedView, last: list[int]) -> Iterator[list[int] | None]:
        """Yield a discarded filler minibatch after the last, if minibatches are prefetched.

        The DataLoader then asks for the next minibatch only after all steps have been taken, and
        ranks may have failed in these steps.
        """
        one_more = False
        while not feed.trained:
            if one_more or self._has_gradients():  # gradient accumulation
                yield None
            else:
                feed.announce_discarded(len(last))
                one_more = True
                yield last

    def _has_gradients(self) -> bool:
        model = getattr(self.learner, "model", None)
        return model is not None and any(p.grad is not None for p in model.parameters())

    def _agree_after_failure(self) -> None:
        """Call `_agree`, with a retry if ranks fail."""
        self._recovery.run(self._agree)

    def _order(self, number: int) -> IndexArray | GroupedOrder:
        if self._grouped is None:
            return epoch_order(self.samples, self.seed, number, self.shuffle)
        return order_of(self._grouped, self.seed, number, self.shuffle)

    def _epoch_at(self, samples: int) -> int:
        return max(0, samples - self.start) // self.samples_per_epoch


class ResumableIterator:
    """An iterator that can continue after StopIteration, once more minibatches are available.

    A DataLoader with workers asks for a further minibatch ahead as each minibatch is used.

    Args:
        given: yields None while no minibatch is available.
    """

    def __init__(self, given: Iterator[list[int] | None]) -> None:
        self._given = given

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[int]:
        minibatch = next(self._given)
        if minibatch is None:
            raise StopIteration
        return minibatch


def _length(dataset: Any) -> Any:
    if isinstance(dataset, int):
        return dataset
    try:
        return len(dataset)
    except TypeError:
        raise UserError(
            f"dataset must be a length, or have a length: it is {kind_of(dataset)}; for a stream "
            "give each rank its own stream, and end with learner.run_dry()"
        ) from None
