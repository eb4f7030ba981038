"""Where the minibatches of a session come from, and how many there are."""

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

MINIBATCH_SIZE = 64  #: where none is given


class SessionMinibatches:
    """The minibatches of a session, from wherever its learner stands.

    Args:
        session: whose values have been checked.
        learner: its learner.
        chosen: the minibatch size that was found in training; 0: as the session says.
        start: samples that the learner had seen before the session.
    Raises:
        UserError: the session's arguments do not fit what it trains on.

    Attributes:
        epochs: passes over the data.
        epoch: samples of all ranks in an epoch.
        begins: samples that the learner had seen before the first one.
        facts: what must be the same when a run is resumed, by name.

    Creation is local; the attributes are there after `meet`.
    """

    def __init__(
        self, session: SessionOptions, learner: Learner, tuned_size: Callable[[], int], start: int
    ) -> None:
        self._session, self._learner, self._tuned_size = session, learner, tuned_size
        train = session.train
        self._source: BaseSource[Any, Any] | None = None
        self._loader: Any = None
        sampler = getattr(train, "batch_sampler", None)
        if isinstance(train, BaseSource):
            self._refuse("minibatch_size", "auto_minibatch_size", "epochs")
            self._source, self._sizes = train, train.minibatch_size
        elif hasattr(sampler, "samples_per_epoch"):
            self._refuse("minibatch_size", "auto_minibatch_size")
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
            )

    def _refuse(self, *names: str) -> None:
        for name in names:
            value = getattr(self._session, name)
            if value is not None:
                raise UserError(
                    f"{name}={shown(value)} must not be given with a source or a DataLoader, "
                    "which knows it"
                )

    @property
    def sizes(self) -> MinibatchSize:
        """Of minibatches, as they were asked for."""
        return self._sizes

    @property
    def total(self) -> int:
        """The learner's samples when training is at its end."""
        total: int = self.start + self.epochs * self.epoch
        return total

    def meet(self) -> None:
        """See that all ranks have the same data. Collective."""
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
        """The minibatches from where the learner stands to the end."""
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
        """Of this rank, as the learner and the objective count them. Local.

        Raises:
            UserError: they do not count alike, or cannot.
        """
        objective = self._session.objective
        if self._source is None:
            return objective.samples_of(batch)  # type: ignore[no-any-return]
        samples = self._source.samples_of(batch)
        counted = objective.samples_of(batch)
        if counted != samples:
            raise UserError(
                f"the source counts {samples} samples in a minibatch, and the objective {counted}: "
                "they must count alike, by the source's unit and the objective's samples"
            )
        return samples

    def size_after(self, samples: int) -> int:
        """Of the minibatch that begins there, in samples of all ranks. Local."""
        size: int = self._tuned_size() or size_after(self._sizes, samples)
        return size

    def rate_factor(self, samples: int) -> float:
        """The factor on the rate, for the size of the minibatch that begins there. Local."""
        follows = self._session.rate_follows
        if follows is None:
            return 1.0
        grown = self.size_after(samples) / size_after(self._sizes, self.start)
        wanted = {"constant": 1.0, "linear": grown, "sqrt": math.sqrt(grown)}
        return wanted[follows] / (grown if self._learner.rate_is_per_sample else 1.0)

    def crossed(self, before: int, every: int | None) -> bool:
        """Whether the learner has come to another multiple of so many samples, or of an epoch,
        since it had seen `before`; at the end in any case. Local."""
        now, every = self._learner.samples, every or self.epoch
        return now >= self.total or (now - self.start) // every > (before - self.start) // every
