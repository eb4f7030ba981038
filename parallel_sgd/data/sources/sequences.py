"""Minibatches of sequences of different lengths, sized by sequences or by tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from ...errors import UserError
from ...validation import LARGEST_INTEGER, choice, integer
from ..order import IndexArray, epoch_order
from ..sequences import Padded, Sequences, as_sequences, require_same_sequences
from ..shares import Weights
from ..validation import Array, DType
from ..view import FeedView, LearnerView
from .minibatches import BaseSource, MinibatchSize, size_after

Unit = Literal["tokens", "sequences"]
Minibatch = tuple[Padded, Padded | Array]


class SequenceSource(BaseSource[Sequences, Minibatch]):
    """Minibatches of whole sequences from data shared by all ranks; each rank reads its part.

    In epoch e the sequences are taken in an order drawn from (seed, e). A minibatch is the longest
    run of sequences with at most `minibatch_size` tokens, or `minibatch_size` sequences. Rank k
    gets the k-th of K contiguous parts with about equal numbers of tokens. So the ranks' parts,
    joined, are the minibatch that a single rank would get, whatever K; every sequence is used
    exactly once an epoch; and all ranks take the same number of steps. A rank has no sequence only
    if the minibatch has fewer sequences than there are ranks.

    The learner counts `unit` as samples: ``learner.step(samples=x.tokens)``, or
    ``samples=len(x.lengths)`` with unit="sequences". The position is a function of the learner's
    samples alone: a new source with the same arguments continues at the clock of a restored
    learner, on any number of ranks.

    Args:
        x: `Sequences`, as `load_cntk_sequences` returns; or a list of arrays [length, …], each of
            integers (which stay int64) or floats.
        y: for a list x: a list of arrays with their own lengths (labels of tokens, say), or an
            array [n, …], a target for each sequence.
        minibatch_size: of all ranks together, in `unit`. With unit="tokens" an upper limit, at
            least the length of the longest sequence; with unit="sequences" an exact number. Or a
            schedule of these by samples, as for `Source`.
        unit: "tokens" or "sequences": unit of `minibatch_size`, of `start` and of the learner's
            count.
        y_fill: the padding value of y; PyTorch's ``cross_entropy`` ignores -100. x is padded with
            zeros.
        epochs, seed, shuffle, dtype, classes, start: as for `Source`.
    Raises:
        UserError: an argument is not as required, or there are no sequences.

    `minibatches` and `epoch` yield (x, y): x as `Padded` (values [m, longest, …], lengths [m]); y
    `Padded` too, or an array [m, …] of a target for each sequence. m may be 0.

    At the first minibatch the ranks compare all lengths and the tokens of a few sequences, and
    raise a SharedError if these differ. Minibatches that begin in a warm start are whole on every
    rank.

    Local; iteration is collective at the first minibatch. Memory: 32 bytes a sequence for the order
    of the current epoch, and one minibatch.

    >>> SequenceSource([np.ones(n) for n in (3, 1, 2)], [0, 1, 2], 4, epochs=10).samples_per_epoch
    6
    """

    _may_be_empty = False

    def __init__(
        self,
        x: Any,
        y: Any = None,
        minibatch_size: MinibatchSize = 4096,
        *,
        unit: Unit = "tokens",
        y_fill: int = 0,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        dtype: DType = np.float32,
        classes: int | None = None,
        start: int = 0,
        shares: Any = None,
    ) -> None:
        self.unit: Unit = choice("unit", unit, ("tokens", "sequences"))
        self.y_fill = integer("y_fill", y_fill, -LARGEST_INTEGER)
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
            shares=shares,
        )
        longest = int(self.dataset.lengths.argmax())
        for size in self._known_sizes():
            if unit == "tokens" and self.dataset.lengths[longest] > size:
                raise UserError(self._too_small(size, longest))
        if self.start + self.epochs * self.samples_per_epoch > LARGEST_INTEGER:
            count = f"{self.samples_per_epoch} {unit}"
            raise UserError(f"epochs={self.epochs} of {count}: must be less than 2**63")

    @property
    def samples_per_epoch(self) -> int:
        """Tokens, or sequences, of all ranks in an epoch."""
        return int(self.dataset.lengths.sum()) if self.unit == "tokens" else len(self.dataset)

    def _known_sizes(self) -> list[int]:
        """Return the minibatch sizes known before training: all but those of a function."""
        size = self.minibatch_size
        if isinstance(size, Mapping):
            return list(size.values())
        return [] if callable(size) else [size]

    def _too_small(self, size: int, sequence: int) -> str:
        return (
            f"minibatch_size={size} must be at least the tokens of every sequence: sequence "
            f"{sequence} has {self.dataset.lengths[sequence]}"
        )

    def _epoch(
        self, number: int, feed: FeedView, learner: LearnerView
    ) -> Iterator[tuple[Padded, Padded | Array]]:
        order = epoch_order(len(self.dataset), self.seed, number, self.shuffle)
        lengths = self.dataset.lengths[order]
        units = lengths if self.unit == "tokens" else np.ones_like(lengths)
        before = np.append(0, units.cumsum())  # units before each sequence of the epoch
        seen = self._seen_of_epoch(number, self.samples_per_epoch, feed, learner)
        begin = int(before.searchsorted(seen))
        if before[begin] != seen:
            learner.fail(
                f"no sequence of epoch {number} begins after the {feed.samples} samples that the "
                "learner has seen"
            )
        while begin < len(order):
            size = size_after(self.minibatch_size, feed.samples)
            end = int(before.searchsorted(before[begin] + size, side="right")) - 1
            if end == begin:
                learner.fail(self._too_small(size, int(order[begin])))
            local, rank = slice(begin, end), learner.comm.rank
            with feed.dealing(self.shares) as weights:
                if feed.distributed:
                    shares = weights or (1,) * learner.comm.size
                    cuts = begin + balanced(lengths[begin:end], shares)
                    local = slice(cuts[rank], cuts[rank + 1])
                feed.announce(int(units[local].sum()), int(before[end] - before[begin]))
            begin = end
            yield self._read(order[local], learner)

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {
            "unit": self.unit,
            "y_fill": self.y_fill,
            "number of sequences": len(self.dataset),
        }

    def _gather_shared(self, learner: LearnerView) -> str:
        return require_same_sequences(
            self.dataset, learner.comm, dtype=self.dtype, classes=self.classes
        )

    def _samples_of_epoch(self, learner: LearnerView) -> int:
        return self.samples_per_epoch

    def samples_of(self, minibatch: Minibatch) -> int:
        x, _ = minibatch
        return x.tokens if self.unit == "tokens" else len(x.lengths)

    def _as_data(self, x: Any, y: Any) -> Sequences:
        return as_sequences(x, y)

    def _read_here(self, indexes: Array) -> Minibatch:
        return self.dataset.read(
            indexes, dtype=self.dtype, classes=self.classes, y_fill=self.y_fill
        )


def balanced(lengths: IndexArray, shares: Weights) -> IndexArray:
    """Cut a run of sequences into contiguous parts with about these shares of the tokens.

    Each cut is placed so that the tokens before the cut are closest to the share of these parts. If
    there are at least as many sequences as parts, each part has at least 1.

    Args:
        lengths: int64 [sequences], tokens of each.
        shares: of the parts; only their ratios count.
    Returns:
        int64 [parts + 1]: part k is from cut k to cut k + 1.

    Local.

    >>> balanced(np.array([5, 1, 1, 1, 8]), (1, 1)).tolist()
    [0, 4, 5]
    """
    size = len(shares)
    parts = np.arange(size + 1)
    count = len(lengths)
    if count <= size:
        return np.minimum(parts, count)
    ends = lengths.cumsum()
    middles = 2 * ends - lengths  # twice the tokens before the middle of each
    before = np.array([*accumulate(shares, initial=0)], float)
    cuts = middles.searchsorted(2 * ends[-1] * before / before[-1])
    ahead: IndexArray = np.maximum.accumulate(cuts - parts)
    return parts + np.minimum(ahead, count - size)
