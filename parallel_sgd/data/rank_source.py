"""Minibatches where every rank has data of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import UserError
from ..validation import integer
from .minibatches import MinibatchSource
from .order import epoch_order, share
from .validation import Array, DType
from .view import LearnerView


class RankSource(MinibatchSource):
    """Minibatches of which every rank contributes a part from data that only it has.

    Rank k takes its share of `minibatch_size` (an equal one, to one sample) from its own samples,
    in an order drawn from (seed, epoch). A rank that has run dry yields empty minibatches, so that
    it keeps answering the others, until a step to which no rank had anything to give
    (`learner.last_samples == 0`) ends the epoch everywhere; any rank may have no samples at all.

    A warm start needs the same minibatch on every rank and is impossible here.

    Args:
        x: this rank's inputs [n, …], n from 0, plain numbers in memory or memory-mapped; or
            without `y` a `Dataset` or any object whose items are pairs (x_i, y_i).
        y: this rank's labels [n, …], integers.
        minibatch_size: samples of all ranks together in a minibatch while none is dry; at least
            the number of ranks.
        epochs: passes over the data, at least 1.
        seed: an integer of at least 0, the same on all ranks.
        shuffle: False takes the samples in their own order in every epoch.
        lengths: the number of samples of every rank, in rank order, the same list on all ranks
            (``comm.allgather_object(len(x))``). With it the position is a function of the learner's
            samples, and training can be resumed; without, only begun.
        dtype, classes, start: as for `Source`.
    Raises:
        UserError: an argument is not as required.

    Local. An epoch takes one step more than the longest rank's data: the empty one that ends it.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        minibatch_size: int = 64,
        *,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        lengths: Sequence[int] | None = None,
        dtype: DType = np.float32,
        classes: int | None = None,
        start: int = 0,
    ) -> None:
        super().__init__(
            x,
            y,
            minibatch_size,
            epochs=epochs,
            seed=seed,
            shuffle=shuffle,
            dtype=dtype,
            classes=classes,
            start=start,
        )
        self.lengths = None if lengths is None else [integer("lengths", n, 0) for n in lengths]
        self._begins = {0: self.start}  # what learner.samples was where each epoch began

    def minibatches(self, learner: LearnerView) -> Iterator[tuple[Array, Array]]:
        """Yield this rank's part of each minibatch, from where the learner stands to the end.

        Args:
            learner: must take a step for every minibatch, an empty one too; `samples` and
                `last_samples` are read after it.
        Yields:
            x [m, …] in `dtype` and int64 y [m, …]: NumPy arrays, the caller's own. m may be 0.
        Raises:
            SharedError: on all ranks, if they disagree on an argument; if a sample that any rank
                reads is not as required (see `Dataset.read`), on the others as they `step`; if
                `minibatch_size` or `lengths` do not fit the ranks, the learner is in its warm
                start, or it stands where this source cannot begin.
            UserError: the learner took no step for the last minibatch.

        Collective at the first minibatch for a learner, when the ranks see that they agree; from
        then on local: the ranks keep step by what they do with the minibatches.
        """
        for number in range(self.epochs):
            yield from self.epoch(number, learner)

    def epoch(self, number: int, learner: LearnerView) -> Iterator[tuple[Array, Array]]:
        """Yield what `minibatches` does, of one epoch: all that the learner has not seen of it.

        Args:
            number: of the epoch, from 0; one after the other, to evaluate in between.
            learner: as for `minibatches`.
        """
        self.meet(learner)
        first = self._first(number, learner)
        if first is None:
            return
        order = epoch_order(len(self.dataset), self.seed, number, self.shuffle)
        part = share(self.minibatch_size, learner.comm.rank, learner.comm.size)
        each = part.stop - part.start
        step = first
        while True:
            x, y = self._read(order[step * each : (step + 1) * each], learner)
            given = len(x)
            yield x, y
            step += 1
            if learner.last_samples < given:
                raise UserError(
                    f"the learner must take a step for every minibatch: its last one had "
                    f"{learner.last_samples} samples, this rank's minibatch {given}"
                )
            if learner.last_samples == 0:
                break
        self._begins[number + 1] = learner.samples

    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), "lengths": self.lengths}

    def _problem(self, learner: LearnerView) -> str | None:
        size = learner.comm.size
        if self.minibatch_size < size:
            return (
                f"minibatch_size={self.minibatch_size} must be at least the number of ranks, "
                f"{size}, where each has data of its own"
            )
        if not learner.distributed:
            return (
                "distributed_after must be 0 where each rank has data of its own: a warm start "
                "needs the same minibatch on every rank"
            )
        if self.lengths is not None and len(self.lengths) != size:
            return f"lengths={self.lengths} must be the number of samples of each of {size} ranks"
        if self.lengths is not None and self.lengths[learner.comm.rank] != len(self.dataset):
            return (
                f"lengths={self.lengths} must be the number of samples of each rank, but rank "
                f"{learner.comm.rank} has {len(self.dataset)}"
            )
        return None

    def _first(self, number: int, learner: LearnerView) -> int | None:
        """Which minibatch of an epoch comes next; None where the epoch is already over."""
        if self.lengths is None:
            if learner.samples != self._begins.get(number):
                learner.fail(
                    f"lengths must be given to go on in epoch {number} after {learner.samples} "
                    "samples: the number of samples of every rank tells the position"
                )
            return 0
        total = sum(self.lengths)
        seen = learner.samples - self.start - number * total
        if seen >= total > 0:
            return None
        size = learner.comm.size
        parts = [share(self.minibatch_size, rank, size) for rank in range(size)]
        step = given = 0
        while given < seen:
            step += 1
            given = sum(
                min(n, step * (part.stop - part.start))
                for n, part in zip(self.lengths, parts, strict=True)
            )
        if given != max(seen, 0):
            learner.fail(
                f"minibatch_size={self.minibatch_size} and lengths={self.lengths} have no "
                f"minibatch that begins after {seen} samples of epoch {number}"
            )
        return step
