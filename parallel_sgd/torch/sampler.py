"""Which samples of a data set are whose: for PyTorch's DataLoader."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sized
from typing import Any, Self, cast

from torch.utils.data import Sampler

from ..data import Dataset, LearnerView
from ..data.order import IndexArray, epoch_order, rank_slice
from ..data.sources.groups import GROUPS_IN_USE, GroupedOrder, has_groups, order_of
from ..data.sources.minibatches import MinibatchSize, checked_minibatch_size, size_after, told_size
from ..data.view import FeedView, Rewound, require_learner
from ..errors import UserError
from ..validation import checked_seed, choice, integer, kind_of
from .loader_seed import LoaderSeed


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

    Each epoch takes one number from PyTorch's generator, however many passes a DataLoader begins in
    it: so training with dropout resumes bit for bit. What a data set draws in workers of the
    DataLoader does not: in the midst of an epoch they begin with another seed.

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
        require_learner(learner)
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
        self._problem, self._agreed_generation = problem, -1
        model = getattr(learner, "model_state", None)  # with generators that checkpoints keep
        self._seed = None if model is None else LoaderSeed(model.generators().values())
        if self._recovery is None:
            self._agree()

    @property
    def _recovery(self) -> Any:
        return getattr(self.learner, "recovery", None)

    def _agree(self) -> None:
        """See that the ranks agree. Collective, once for each group of ranks: one that joins comes
        here as it begins, and the others as they go on."""
        comm = self.learner.comm
        generation = getattr(comm, "generation", 0)
        if generation == self._agreed_generation:
            return
        comm.raise_together(self._problem)
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
        comm.require_agreement(facts)
        self._agreed_generation = generation

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs that the learner has not finished, up to `count`: one pass over
        the DataLoader for each.

        Collective where ranks survive each other, else local. An epoch into which training has gone
        back after its pass had ended is given again.
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
        """An epoch's number; again, where ranks have died and some of it is left."""
        while True:
            before = self._rollbacks()
            yield number
            if self._recovery is not None:
                self._recovery.complete_pass()
            if self._rollbacks() == before or self._epoch_at(self.learner.samples) > number:
                return

    def _rollbacks(self) -> int:
        """How often training has gone back."""
        return 0 if self._recovery is None else int(self._recovery.times)

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
        if getattr(self.learner, "serves", False):
            return iter(())
        if self._seed is not None:
            self._seed.begin()
        return ResumableIterator(self._pass())

    def _pass(self) -> Iterator[list[int] | None]:
        """The minibatches of a pass; None where there is nothing more at present."""
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
                    if self._recovery is not None:
                        yield from self._until_trained(feed, last)
                        feed.complete()
                    return
                except Rewound:
                    self._agree_after_failure()
                    feed.begin_again()

    def _align_seed(self, begin: int, samples: int) -> None:
        """See that the epoch takes one number from PyTorch's generators.

        Args:
            begin: samples at which the epoch begins.
            samples: where the pass begins.
        """
        if self._seed is not None:
            state = cast(Any, self.learner).model_state
            self._seed.settle(counted=samples > begin or state.epoch == begin)
            state.epoch = begin

    def _minibatches(self, feed: FeedView, end: int) -> Generator[list[int], None, list[int]]:
        """From where the learner stands to `end`; the last one, once more, is what it returns."""
        position, number, indexes = feed.samples - self.start, -1, list[int]()
        while position < end:
            if number != position // self.samples_per_epoch:
                number = position // self.samples_per_epoch
                order, begin = self._order(number), number * self.samples_per_epoch
            seen = position - begin
            stop = min(seen + size_after(self.minibatch_size, feed.samples), self.samples_per_epoch)
            minibatch, position = order[seen:stop], begin + stop
            own = minibatch
            if feed.distributed:
                comm = self.learner.comm
                own = minibatch[rank_slice(len(minibatch), comm.rank, comm.size)]
            feed.announce(len(own), len(minibatch))
            indexes = (own if len(own) else minibatch[-1:]).tolist()
            yield indexes
        return indexes

    def _until_trained(self, feed: FeedView, last: list[int]) -> Iterator[list[int] | None]:
        """Where minibatches are fetched ahead: one more, of which no step takes notice, so that the
        next one is asked for when all steps have been taken, and ranks may have died in them."""
        one_more = False
        while not feed.trained:
            if one_more or self._has_gradients():  # several minibatches are added up for a step
                yield None
            else:
                feed.announce_discarded(len(last))
                one_more = True
                yield last

    def _has_gradients(self) -> bool:
        model = getattr(self.learner, "model", None)
        return model is not None and any(p.grad is not None for p in model.parameters())

    def _agree_after_failure(self) -> None:
        """`_agree`, again where ranks have died in it, for a learner that can go on."""
        if self._recovery is not None:
            cast(Any, self.learner).surviving(self._agree)

    def _order(self, number: int) -> IndexArray | GroupedOrder:
        if self._grouped is None:
            return epoch_order(self.samples, self.seed, number, self.shuffle)
        return order_of(self._grouped, self.seed, number, self.shuffle)

    def _epoch_at(self, samples: int) -> int:
        return max(0, samples - self.start) // self.samples_per_epoch


class ResumableIterator:
    """An iterator that goes on after its end, where there is more by then: a DataLoader with
    workers asks at each minibatch for one further ahead.

    Args:
        given: None where there is nothing at present.
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
            f"dataset must have a length, or be one: it is {kind_of(dataset)}; for a stream give "
            "each rank its own, and end with learner.run_dry()"
        ) from None
