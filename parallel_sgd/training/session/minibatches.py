"""The minibatches of a session: their source, number and size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from ...data import BaseSource, Source, as_dataset
from ...data.sources.minibatches import MinibatchSize, size_after, size_summary
from ...errors import UserError
from ...validation import shown
from ..learner import Learner
from .batches import Batch
from .options import SessionOptions

MINIBATCH_SIZE = 64  #: default, in samples of all ranks


class SessionMinibatches:
    """Iterates over a session's minibatches, from the learner's present place to the end.

    Args:
        session: the checked options.
        learner: the session's learner.
        tuned_size: returns the minibatch size found by `AutoMinibatchSize`; 0: as the session's
            options say.
        start: the learner's samples before the session.
    Raises:
        UserError: the session's arguments do not fit its training data.

    Attributes:
        epochs: passes over the data.
        epoch: samples of all ranks in an epoch.
        start: the learner's samples before the first minibatch.
        facts: values that must be equal when a run is resumed, by name.

    Creation is local. The attributes exist after `meet`.
    """

    def __init__(
        self, session: SessionOptions, learner: Learner, tuned_size: Callable[[], int], start: int
    ) -> None:
        self._session, self._learner, self.tuned_size = session, learner, tuned_size
        train = session.train
        self._source: BaseSource[Any, Any] | None = None
        self._loader: Any = None
        sampler = getattr(train, "batch_sampler", None)
        if isinstance(train, BaseSource):
            self._refuse("minibatch_size", "auto_minibatch_size", "epochs", "shares")
            self._source, self._sizes = train, train.minibatch_size
        elif hasattr(sampler, "samples_per_epoch"):
            self._refuse("minibatch_size", "auto_minibatch_size", "shares")
            assert sampler is not None
            self._loader, self._sizes = train, sampler.minibatch_size
        else:
            self._sizes = session.minibatch_size or MINIBATCH_SIZE
            self._source = Source(
                as_dataset(train),
                minibatch_size=self.size_after,
                epochs=session.epochs or 1,
                seed=session.seed,
                start=start,
                dtype=session.objective.dtype,
                classes=session.objective.classes,
                shares=session.shares,
            )

    def _refuse(self, *names: str) -> None:
        for name in names:
            value = getattr(self._session, name)
            if value is not None:
                raise UserError(
                    f"{name}={shown(value)} must not be given with a source or a DataLoader, "
                    "which determines it"
                )

    @property
    def sizes(self) -> MinibatchSize:
        """The requested minibatch size, or sizes by samples."""
        return self._sizes

    @property
    def total(self) -> int:
        """The learner's samples at the end of training."""
        total: int = self.start + self.epochs * self.epoch
        return total

    def meet(self) -> None:
        """Check that all ranks have the same data. Collective."""
        source, learner = self._source, self._learner
        self.facts: dict[str, Any] = {"minibatch_size": size_summary(self._sizes)}
        if source is None:
            origin = self._loader.batch_sampler
            self.epochs, self.epoch = self._session.epochs or 1, origin.samples_per_epoch
        else:
            origin = source
            self.epochs, self.epoch = source.epochs, source.samples_in_epoch(learner)
            if isinstance(source, Source):
                self.facts["training data"] = source.fingerprint(learner)
        self.start: int = origin.start
        self.facts = {"seed": origin.seed, "number of samples": self.epoch, **self.facts}

    def __iter__(self) -> Iterator[Batch]:
        """Yield the minibatches from the learner's present place to the end."""
        if self._source is not None:
            yield from self._source.minibatches(self._learner)
            return
        for _ in self._loader.batch_sampler.epochs(self.epochs):
            for batch in self._loader:
                if not isinstance(batch, tuple | list):
                    self._learner.fail(
                        "a minibatch must be a list of its parts: inputs, and targets last"
                    )
                yield batch

    def samples_of(self, batch: Batch) -> int:
        """Count this rank's samples in a minibatch, as the learner and the objective do. Local.

        Raises:
            UserError: learner and objective count differently, or cannot count.
        """
        objective = self._session.objective
        if self._source is None:
            return objective.samples_of(batch)  # type: ignore[no-any-return]
        samples = self._source.samples_of(batch)
        counted = objective.samples_of(batch)
        if counted != samples:
            raise UserError(
                f"the source counts {samples} samples in a minibatch, and the objective {counted}: "
                "both must count the same, by the source's unit and the objective's samples"
            )
        return samples

    def size_after(self, samples: int) -> int:
        """Return the size of the minibatch that begins there, in samples of all ranks. Local.

        Args:
            samples: the learner's samples before the minibatch.
        """
        size: int = self.tuned_size() or size_after(self._sizes, samples)
        return size

    def rate_factor(self, samples: int) -> float:
        """Return the factor on the learning rate that follows from the minibatch size. Local.

        Args:
            samples: the learner's samples before the minibatch.
        """
        follows = self._session.rate_follows
        if follows is None:
            return 1.0
        grown = self.size_after(samples) / size_after(self._sizes, self.start)
        wanted = {"constant": 1.0, "linear": grown, "sqrt": math.sqrt(grown)}
        return wanted[follows] / (
            grown if self._learner.local_step.optimizer.rate_is_per_sample else 1.0
        )

    def crossed(self, before: int, every: int | None) -> bool:
        """Return whether the learner has passed a multiple of `every`. True at the end. Local.

        Args:
            before: the learner's samples at the previous look.
            every: samples of all ranks, counted from `start`. None: an epoch.
        """
        now, every = self._learner.samples, every or self.epoch
        return now >= self.total or (now - self.start) // every > (before - self.start) // every
