"""What all sources have in common: their arguments, agreement among the ranks, and reading."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import ref

import numpy as np

from ...errors import SharedError, UserError
from ...validation import LARGEST_INTEGER, checked_seed, choice, function, integer, points
from ..dataset import Dataset
from ..items import as_dataset
from ..validation import Array, DType, float_dtype
from ..view import FeedView, LearnerView, RolledBack, require_learner

MinibatchSize = int | Mapping[int, int] | Callable[[int], int]
"""Samples of all ranks in a minibatch: a number; a number from so many samples on; or a function of
the samples that all ranks have seen, the same on all of them."""


def checked_minibatch_size(size: Any) -> MinibatchSize:
    """A minibatch size as plain values. Local.

    Raises:
        UserError: it is no number of at least 1, nor a schedule of such, from 0 samples on.
    """
    if isinstance(size, Mapping):
        return points("minibatch_size", size, lambda name, value: integer(name, value, 1))
    if callable(size):
        return function("minibatch_size", size, "of the samples that all ranks have seen")  # type: ignore[no-any-return]
    return integer("minibatch_size", size, 1)


def size_after(size: MinibatchSize, samples: int) -> int:
    """Samples of all ranks in the minibatch that begins after so many. Local.

    >>> [size_after({0: 64, 1000: 128}, samples) for samples in (0, 960, 1024)]
    [64, 64, 128]
    """
    if isinstance(size, Mapping):
        return size[max(start for start in size if start <= samples)]
    return integer("minibatch_size", size(samples), 1) if callable(size) else size


Data = TypeVar("Data", bound=Sized)
Minibatch = TypeVar("Minibatch")


class BaseSource(ABC, Generic[Data, Minibatch]):
    """Base of the sources; each says in its own docstring what the arguments are."""

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
    ) -> None:
        self.dataset = self._as_data(x, y)
        self.minibatch_size = checked_minibatch_size(minibatch_size)
        self.epochs = integer("epochs", epochs, 1)
        self.seed = checked_seed(seed)
        self.shuffle = choice("shuffle", shuffle, (True, False))
        self.dtype = float_dtype(dtype)
        self.classes = None if classes is None else integer("classes", classes, 1)
        self.start = integer("start", start, 0)
        if self.start + self.epochs * len(self.dataset) > LARGEST_INTEGER:
            raise UserError(
                f"epochs={self.epochs} of {len(self.dataset)} samples: must be less than 2**63"
            )
        if len(self.dataset) == 0 and not self._may_be_empty:
            raise UserError(f"a source needs at least one sample: {self.dataset!r} is empty")
        # Threads that share a source have a learner each; ids, as a learner need not be hashable.
        self._met: dict[int, tuple[ref[Any], tuple[ref[Any], int], Any]] = {}

    def minibatches(self, learner: LearnerView) -> Iterator[Minibatch]:
        """Yield this rank's part of each minibatch, from where the learner stands to the end.

        Args:
            learner: where it stands is read at the beginning and between epochs. Minibatches that
                have been fetched ahead count as if they had been trained on. It must take a step
                for every minibatch, an empty one too.
        Yields:
            x [m, …] in `dtype` and y [m, …], int64 or in `dtype`: NumPy arrays, the caller's own. m
                may be 0.
        Raises:
            SharedError: on all ranks, if they disagree on an argument; if the learner stands before
                `start`, or where no minibatch begins; if the source refuses the ranks or their data
                (see its class); or if a sample that any rank reads is not as required (see
                `Dataset.read`), on the others as they next wait for it.

        Collective at the first minibatch for a learner, when the ranks see that they agree; from
        then on local: the ranks keep step by what they do with the minibatches.
        """
        require_learner(learner)
        if getattr(learner, "serves", False):  # this rank has no part in the data
            return

        def left(feed: FeedView) -> Iterable[int]:
            return self._epochs_left(self._samples_of_epoch(learner), feed, learner)

        yield from self._pass(learner, left)

    def epoch(self, number: int, learner: LearnerView) -> Iterator[Minibatch]:
        """Yield what `minibatches` does, of one epoch: all that the learner has not seen of it.

        Args:
            number: of the epoch, from 0; one after the other, to evaluate in between.
            learner: as for `minibatches`.
        """
        require_learner(learner)
        number = integer("number", number, 0)
        if getattr(learner, "serves", False):
            return
        yield from self._pass(learner, lambda feed: [number])

    def _pass(
        self, learner: LearnerView, epochs: Callable[[FeedView], Iterable[int]]
    ) -> Iterator[Minibatch]:
        """The minibatches of some epochs; again from where the learner has gone back to."""
        self._meet(learner)
        with learner.feed() as feed:
            while True:
                try:
                    for number in epochs(feed):
                        yield from self._epoch(number, feed, learner)
                    if not feed.may_rewind:
                        return
                    if not feed.trained:
                        # Fetched ahead: one more, so that the next one is asked for when all steps
                        # have been taken, and ranks may have died in them.
                        feed.announce_discarded(0)
                        yield self._read(np.empty(0, np.int64), learner)
                    feed.complete()
                    return
                except RolledBack:
                    feed.resume()
                    self._meet(learner)

    @abstractmethod
    def _epoch(self, number: int, feed: FeedView, learner: LearnerView) -> Iterator[Minibatch]:
        """What the learner has not seen of an epoch."""

    def samples_of(self, minibatch: Minibatch) -> int:
        """What a minibatch of this rank counts in ``learner.step(samples=…)``. Local."""
        first: Any = minibatch[0]  # type: ignore[index]
        return len(first)

    def samples_in_epoch(self, learner: LearnerView) -> int:
        """Samples of all ranks in an epoch. Collective at the first use with a learner."""
        self.meet(learner)
        return self._samples_of_epoch(learner)

    @abstractmethod
    def _samples_of_epoch(self, learner: LearnerView) -> int:
        """Samples of all ranks in an epoch."""

    def _facts(self) -> dict[str, Any]:
        """What must be the same on all ranks, by the names that the user knows."""
        return {
            "minibatch_size": size_summary(self.minibatch_size),
            "epochs": self.epochs,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "start": self.start,
            "classes": self.classes,
            "dtype": None if self.dtype is None else str(self.dtype),
        }

    def _problem(self, learner: LearnerView) -> str | None:
        """What keeps this rank from feeding the learner, in one line, where its ranks agree."""
        return None

    def _gather_shared(self, learner: LearnerView) -> Any:
        """What this source has to know of all ranks. Collective."""
        return None

    def _shared(self, learner: LearnerView) -> Any:
        """What `_gather_shared` has returned for a learner that it has met."""
        return self._met[id(learner)][2]

    def meet(self, learner: LearnerView) -> None:
        """See that this source can feed a learner, and does alike on all ranks.

        The first minibatch does this by itself; call it to know before anything else is done.

        Raises:
            SharedError: on all ranks, if they disagree or any of them has a problem.

        Collective at the first use with a learner and its communicator; else local.
        """
        if self._has_met(learner):
            return
        learner.comm.require_agreement(self._facts())
        learner.comm.raise_together(self._problem(learner))
        known = self._gather_shared(learner)
        self._met[id(learner)] = ref(learner), _ranks_of(learner), known

    def _has_met(self, learner: LearnerView) -> bool:
        met = self._met.get(id(learner))
        return bool(met and met[0]() is learner and met[1] == _ranks_of(learner))

    def _meet(self, learner: LearnerView) -> None:
        """`meet`, again where ranks have died in it, for a learner that can go on. Local where they
        have met: other workers of parameter servers may have come to their end."""
        if self._has_met(learner):
            return
        surviving = getattr(learner, "surviving", None)
        surviving(partial(self.meet, learner)) if surviving else self.meet(learner)

    def _position(self, feed: FeedView, learner: LearnerView) -> int:
        """How many samples of this source have been given for the learner."""
        if feed.samples < self.start:
            learner.fail(
                f"start={self.start} must be at most the {feed.samples} samples that the "
                "learner has seen"
            )
        return feed.samples - self.start

    def _epochs_left(self, samples: int, feed: FeedView, learner: LearnerView) -> range:
        """The epochs, of so many samples each, from where the learner stands; the last in any case,
        of which nothing may be left."""
        if samples == 0:
            return range(0)
        first = self._position(feed, learner) // samples
        return range(min(first, self.epochs - 1), self.epochs)

    def _seen_of_epoch(
        self, number: int, samples: int, feed: FeedView, learner: LearnerView
    ) -> int:
        """How many of an epoch's samples have been given for the learner."""
        position = self._position(feed, learner) - number * samples
        waiting = feed.samples - learner.samples
        if 0 <= position - waiting < samples <= position:
            learner.fail(
                f"epoch {number} has been given already, and {waiting} samples of it wait for "
                "their step"
            )
        return min(max(position, 0), samples)

    @abstractmethod
    def _as_data(self, x: Any, y: Any) -> Data:
        """What the user has given, as the data of this source."""

    @abstractmethod
    def _read_here(self, indexes: Array) -> Minibatch:
        """Read some of the data; raises a UserError where they are not as required."""

    def _read(self, indexes: Array, learner: LearnerView) -> Minibatch:
        """Read samples; where they are not as required, end the step of all ranks."""
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
    """Base of the sources of samples that are alike in shape: two arrays are a minibatch."""

    def _as_data(self, x: Any, y: Any) -> Dataset:
        return as_dataset(x, y)

    def _read_here(self, indexes: Array) -> tuple[Array, Array]:
        return self.dataset.read(indexes, dtype=self.dtype, classes=self.classes)


def size_summary(size: MinibatchSize) -> int | str:
    """What the ranks compare of a minibatch size, and a source shows."""
    if isinstance(size, int):
        return size
    return repr(size) if isinstance(size, Mapping) else f"by {type(size).__name__}"


def _ranks_of(learner: LearnerView) -> tuple[ref[Any], int]:
    return ref(learner.comm), getattr(learner.comm, "generation", 0)
