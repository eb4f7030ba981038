"""Base classes of the sources: arguments, agreement among the ranks, and reading."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from itertools import chain, pairwise
from typing import Any, Generic, TypeVar, cast
from weakref import ref

import numpy as np

from ...errors import SharedError, UserError
from ...validation import LARGEST_INTEGER, checked_seed, choice, function, integer, points
from ..dataset import Dataset
from ..items import as_dataset
from ..shares import MEASURED, checked_shares, problem_with_shares
from ..validation import Array, DType, float_dtype
from ..view import Agreement, FeedView, LearnerView, RolledBack, require_learner

MinibatchSize = int | Mapping[int, int] | Callable[[int], int]
"""Samples of all ranks in a minibatch: a number, a mapping {samples seen: number}, or a function of
the samples seen by all ranks. The same on all ranks."""


def checked_minibatch_size(size: Any) -> MinibatchSize:
    """Convert a minibatch size to plain values. Local.

    Raises:
        UserError: neither a number of at least 1, nor a schedule of such numbers from 0 samples on.
    """
    if isinstance(size, Mapping):
        return points("minibatch_size", size, lambda name, value: integer(name, value, 1))
    if callable(size):
        return function("minibatch_size", size, "of the samples that all ranks have seen")  # type: ignore[no-any-return]
    return integer("minibatch_size", size, 1)


def size_after(size: MinibatchSize, samples: int) -> int:
    """Return the size, over all ranks, of the minibatch that begins after so many samples. Local.

    >>> [size_after({0: 64, 1000: 128}, samples) for samples in (0, 960, 1024)]
    [64, 64, 128]
    """
    if isinstance(size, Mapping):
        return size[max(start for start in size if start <= samples)]
    return integer("minibatch_size", size(samples), 1) if callable(size) else size


Data = TypeVar("Data", bound=Sized)
Minibatch = TypeVar("Minibatch")
Item = TypeVar("Item")


class BaseSource(ABC, Generic[Data, Minibatch]):
    """Base of all sources. The docstring of each subclass describes the arguments."""

    _may_be_empty = True

    def __init__(
        self,
        x: Any,
        y: Any = None,
        minibatch_size: MinibatchSize = 64,
        *,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        dtype: DType = np.float32,
        classes: int | None = None,
        start: int = 0,
        shares: Any = None,
    ) -> None:
        self.dataset = self._as_data(x, y)
        self.minibatch_size = checked_minibatch_size(minibatch_size)
        self.epochs = integer("epochs", epochs, 1)
        self.seed = checked_seed(seed)
        self.shuffle = choice("shuffle", shuffle, (True, False))
        self.dtype = float_dtype(dtype)
        self.classes = None if classes is None else integer("classes", classes, 1)
        self.start = integer("start", start, 0)
        self.shares = checked_shares(shares)
        if self.start + self.epochs * len(self.dataset) > LARGEST_INTEGER:
            raise UserError(
                f"epochs={self.epochs} of {len(self.dataset)} samples: must be less than 2**63"
            )
        if len(self.dataset) == 0 and not self._may_be_empty:
            raise UserError(f"a source needs at least one sample: {self.dataset!r} is empty")
        # Threads that share a source each have a learner. Keys are ids: learners may be unhashable.
        self._met: dict[int, tuple[ref[Any], Agreement, Any]] = {}

    def minibatches(self, learner: LearnerView) -> Iterator[Minibatch]:
        """Yield this rank's part of each minibatch, from the learner's clock to the last epoch.

        Args:
            learner: its clock is read at the beginning and between epochs. Minibatches fetched
                ahead count as trained on. The learner must take a step for every minibatch, even an
                empty one.
        Yields:
            x [m, …] in `dtype` and y [m, …], int64 or in `dtype`: NumPy arrays. The caller owns
            both and may change them. m may be 0.
        Raises:
            SharedError: on all ranks, if the ranks disagree on an argument; if the learner's clock
                is before `start` or within a minibatch; if the source refuses the ranks or their
                data (see its class); or if a sample read by any rank is not as required (see
                `Dataset.read`). In the last case the remaining ranks raise when they next wait for
                the failed rank.

        Collective at the first minibatch for a learner, when the ranks check that they agree. Local
        from then on: the steps taken with the minibatches keep the ranks in lockstep.
        """
        require_learner(learner)
        if getattr(learner, "serves", False):  # a server gets no minibatches
            return

        def left(feed: FeedView) -> Iterable[int]:
            return self._epochs_left(self._samples_of_epoch(learner), feed, learner)

        yield from self._pass(learner, left)

    def epoch(self, number: int, learner: LearnerView) -> Iterator[Minibatch]:
        """Yield the minibatches of one epoch, without those already seen by the learner.

        Args:
            number: of the epoch, from 0. Take the epochs in turn; evaluate in between.
            learner: as for `minibatches`.
        Yields, Raises: as for `minibatches`. Collective at the first minibatch for a learner, then
        local.
        """
        require_learner(learner)
        number = integer("number", number, 0)
        if getattr(learner, "serves", False):
            return
        yield from self._pass(learner, lambda feed: [number])

    def _pass(
        self, learner: LearnerView, epochs: Callable[[FeedView], Iterable[int]]
    ) -> Iterator[Minibatch]:
        """Yield the minibatches of some epochs; after a rollback, resume at the learner's clock."""
        self._meet(learner)
        with learner.feed() as feed:
            while True:
                try:
                    for number in epochs(feed):
                        yield from self._epoch(number, feed, learner)
                    if not feed.may_roll_back:
                        return
                    if not feed.trained:
                        # Minibatches were fetched ahead: issue an empty one, to return here only
                        # after all steps, and so to notice a failure of ranks in these steps.
                        feed.announce_discarded(0)
                        yield self._read(np.empty(0, np.int64), learner)
                    feed.complete()
                    return
                except RolledBack:
                    feed.resume()
                    self._meet(learner)

    @abstractmethod
    def _epoch(self, number: int, feed: FeedView, learner: LearnerView) -> Iterator[Minibatch]:
        """Yield the minibatches of an epoch, without those already seen by the learner."""

    def samples_of(self, minibatch: Minibatch) -> int:
        """Return the samples of this rank's minibatch, for ``learner.step(samples=…)``. Local."""
        first: Any = minibatch[0]  # type: ignore[index]
        return len(first)

    def samples_in_epoch(self, learner: LearnerView) -> int:
        """Return the samples of all ranks in an epoch. Collective at the first use by a learner."""
        self.meet(learner)
        return self._samples_of_epoch(learner)

    @abstractmethod
    def _samples_of_epoch(self, learner: LearnerView) -> int:
        """Return the samples of all ranks in an epoch, after `meet`. Local."""

    def _facts(self) -> dict[str, Any]:
        """Return the values to compare between the ranks, by the names known to the user."""
        return {
            "minibatch_size": size_summary(self.minibatch_size),
            "epochs": self.epochs,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "start": self.start,
            "classes": self.classes,
            "dtype": None if self.dtype is None else str(self.dtype),
            "shares": self.shares,
        }

    def _problem(self, learner: LearnerView) -> str | None:
        """Return this rank's reason, in one line, for not feeding the learner; else None.

        Called after the ranks have agreed on `_facts`.
        """
        return None

    def _gather_shared(self, learner: LearnerView) -> Any:
        """Exchange facts about the ranks' data, and return the result for `meet`. Collective."""
        return None

    def _shared(self, learner: LearnerView) -> Any:
        """Return the result of `_gather_shared` for a learner after `meet`."""
        return self._met[id(learner)][2]

    def meet(self, learner: LearnerView) -> None:
        """Check on all ranks that this source can feed a learner, with equal arguments everywhere.

        The first minibatch does this implicitly. Call the method to fail before any other work is
        done.

        Args:
            learner: the learner to feed.
        Raises:
            SharedError: on all ranks, if the ranks disagree or any rank has a problem.

        Collective at the first use with a learner and its communicator; later calls are local.
        """
        if self._has_met(learner):
            return
        learner.comm.require_agreement(self._facts())
        problem = problem_with_shares(self.shares, learner.comm) or self._problem(learner)
        learner.comm.raise_together(problem)
        if self.shares == MEASURED:
            learner.shares.measure()
        known = self._gather_shared(learner)
        self._met[id(learner)] = ref(learner), Agreement(learner), known

    def _has_met(self, learner: LearnerView) -> bool:
        met = self._met.get(id(learner))
        return bool(met and met[0]() is learner and met[1].holds(learner))

    def _meet(self, learner: LearnerView) -> None:
        """Call `meet`, retried after failures of ranks if the learner is fault-tolerant.

        Local if the learner is known already: other workers of parameter servers may have finished.
        """
        if not self._has_met(learner):
            learner.repeated(partial(self.meet, learner))

    def _position(self, feed: FeedView, learner: LearnerView) -> int:
        """Return the number of samples of this source issued to the learner, over all ranks."""
        if feed.samples < self.start:
            learner.fail(
                f"start={self.start} must be at most the {feed.samples} samples that the "
                "learner has seen"
            )
        return feed.samples - self.start

    def _epochs_left(self, samples: int, feed: FeedView, learner: LearnerView) -> range:
        """Return the epochs from the learner's clock on, given the samples in an epoch.

        The last epoch is always included, even if no minibatch of the epoch is left.
        """
        if samples == 0:
            return range(0)
        first = self._position(feed, learner) // samples
        return range(min(first, self.epochs - 1), self.epochs)

    def _seen_of_epoch(
        self, number: int, samples: int, feed: FeedView, learner: LearnerView
    ) -> int:
        """Return the number of samples of an epoch issued to the learner, by all ranks.

        Fails if the epoch has been issued completely, and some of its samples still wait for a
        step.
        """
        position = self._position(feed, learner) - number * samples
        waiting = feed.samples - learner.samples
        if 0 <= position - waiting < samples <= position:
            learner.fail(
                f"epoch {number} has been issued already, and {waiting} of its samples wait for "
                "a step"
            )
        return min(max(position, 0), samples)

    @abstractmethod
    def _as_data(self, x: Any, y: Any) -> Data:
        """Convert the user's x and y to this source's kind of data."""

    @abstractmethod
    def _read_here(self, indexes: Array) -> Minibatch:
        """Read some of the data; raise a UserError if the data are not as required."""

    def _read(self, indexes: Array, learner: LearnerView) -> Minibatch:
        """Read samples; if the data are not as required, fail the step on all ranks."""
        try:
            return self._read_here(indexes)
        except SharedError:
            raise
        except UserError as error:
            learner.fail(str(error))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.dataset!r}, "
            f"minibatch_size={size_summary(self.minibatch_size)}, epochs={self.epochs}, "
            f"seed={self.seed}, shuffle={self.shuffle})"
        )


class MinibatchSource(BaseSource[Dataset, tuple[Array, Array]]):
    """Base of the sources of samples of equal shape: a minibatch is two arrays."""

    def _as_data(self, x: Any, y: Any) -> Dataset:
        return as_dataset(x, y)

    def _read_here(self, indexes: Array) -> tuple[Array, Array]:
        return self.dataset.read(indexes, dtype=self.dtype, classes=self.classes)


def size_summary(size: MinibatchSize) -> int | str:
    """Return a minibatch size as compared between the ranks and shown in `repr`."""
    if isinstance(size, int):
        return size
    return repr(size) if isinstance(size, Mapping) else f"by {type(size).__name__}"


def with_next(items: Iterable[Item]) -> Iterator[tuple[Item, Item | None]]:
    """Yield each item together with its successor, None after the last.

    Reads one item ahead, so that embedding rows for the next minibatch can be pulled during a step.
    Local.

    >>> list(with_next("abc"))
    [('a', 'b'), ('b', 'c'), ('c', None)]
    """
    yield from cast(Iterator[tuple[Item, Item | None]], pairwise(chain(items, [None])))
