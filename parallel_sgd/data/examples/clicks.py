"""Synthetic clicks with ids from a space too large for memory, for embedding tables."""

from __future__ import annotations

import math

import numpy as np

from ...errors import UserError
from ...validation import checked_seed, integer, number
from ..dataset import Dataset, samples_to_test
from ..hashing import LARGEST_ID, STEP, fractions, mixed
from ..validation import Array, DType, checked_labels, float_dtype

CLICKS_CLASSES = 2
STREAM = (0, 2)  #: appended to the seed
RANK_BITS = 48  #: bits of the rank in an id before mixing; the field's number is in the bits above
PART = 1 << 16  #: samples generated at a time by `bayes_loss`


class Clicks(Dataset):
    """Samples computed from their number and the seed: nothing is stored.

    Each field of a sample holds an id: the r-th most frequent of `vocabulary` ids with a
    probability close to r^-exponent. So a few ids are everywhere, and most ids never occur. A click
    has

        log(p / (1 - p)) = bias + Σ_f w(id_f),    w uniform, of variance deviation² / fields

    where w is a hash of the id and the seed. y is 1 with probability p. Fields share no ids. The
    ids are hashes too: int64 over all of the 2^63 nonnegative numbers.

    Args:
        samples: number of samples, at least 1.
        fields: ids in a sample, at least 1.
        seed: decides ids, w and y; an integer of at least 0.
        first: the first sample's number. Data sets with disjoint ranges of numbers share w and
            nothing else.
        vocabulary: different ids in a field, up to 2^48.
        exponent: of the power law, at least 0; for 1, r is log-uniform.
        bias, deviation: mean and standard deviation of the log odds over uniformly drawn ids.
    Raises:
        UserError: an argument is not as required.

    `read` returns int64 ids for any `dtype`: floats cannot represent all ids. Local.

    >>> data = Clicks(1000, fields=3)
    >>> x, y = data.read(np.arange(5))
    >>> x.shape, x.dtype, y.shape
    ((5, 3), dtype('int64'), (5,))
    """

    repeatable = True

    def __init__(
        self,
        samples: int,
        fields: int = 8,
        *,
        seed: int = 0,
        first: int = 0,
        vocabulary: int = 10**11,
        exponent: float = 1.2,
        bias: float = -1.0,
        deviation: float = 2.0,
    ) -> None:
        self.samples = integer("samples", samples, 1)
        self.fields = integer("fields", fields, 1, 1 << 15)
        self.seed, self.first = checked_seed(seed), integer("first", first, 0)
        self.vocabulary = integer("vocabulary", vocabulary, 1, (1 << RANK_BITS) - 1)
        self.exponent = number("exponent", exponent, 0, most=100)
        self.bias = number("bias", bias, -100, most=100)
        self.deviation = number("deviation", deviation, 0, most=100)
        if (self.first + self.samples) * (self.fields + 1) >= 1 << 63:
            raise UserError(f"first={first} and samples={samples} are too large together")
        stream = np.random.SeedSequence((self.seed, *STREAM)).generate_state(2, np.uint64)
        self._draws, self._weights = stream

    def __len__(self) -> int:
        return self.samples

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        float_dtype(dtype)  # checks dtype
        draws = self._draw(indexes)
        x = self._ids(draws[:, :-1])
        clicked = draws[:, -1] < _probabilities(self._scores(x))
        y = clicked.astype(np.int64)
        return x, y if classes is None else checked_labels("y", y, indexes, classes)

    def probabilities(self, indexes: Array) -> Array:
        """Return the true probability of a click for some samples, float64 [m]. Local."""
        return _probabilities(self._scores(self._ids(self._draw(indexes)[:, :-1])))

    def bayes_loss(self) -> float:
        """Return the Bayes loss: the mean loss, in nats, of a model that knows w.

            mean of -p log p - (1 - p) log(1 - p)

        No model's expected loss is lower. A trained model has seen some ids rarely or never, and
        stays above this loss. Local. Cost: generates all samples, part by part.
        """
        total = 0.0
        for begin in range(0, self.samples, PART):
            part = np.arange(begin, min(begin + PART, self.samples))
            scores = self._scores(self._ids(self._draw(part)[:, :-1]))
            total += float((np.logaddexp(0, scores) - scores * _probabilities(scores)).sum())
        return total / self.samples

    def _draw(self, indexes: Array) -> Array:
        """Return a float64 in [0, 1) for each field of each sample, and one more for its label."""
        numbers = (np.asarray(indexes, np.uint64) + np.uint64(self.first))[:, None]
        count = np.uint64(self.fields + 1)
        places = numbers * count + np.arange(count, dtype=np.uint64)
        with np.errstate(over="ignore"):
            return fractions(mixed(places * STEP + self._draws))

    def _ids(self, draws: Array) -> Array:
        """Return the ids of draws [m, fields], by the inverse of r's distribution function.

        P(rank at most r) = ((r + 1)^t - 1) / ((vocabulary + 1)^t - 1),    t = 1 - exponent
        """
        t, longest = 1 - self.exponent, math.log(self.vocabulary + 1)
        logs = np.log1p(draws * math.expm1(t * longest)) / t if t else draws * longest
        ranks = np.clip(np.exp(logs), 1, self.vocabulary).astype(np.uint64)
        fields = np.arange(self.fields, dtype=np.uint64) << np.uint64(RANK_BITS)
        return (mixed(ranks | fields) & np.uint64(LARGEST_ID)).astype(np.int64)

    def _scores(self, x: Array) -> Array:
        """Return the log odds of a click for ids [m, fields]."""
        hidden = fractions(mixed(x.astype(np.uint64) ^ self._weights))
        largest = self.deviation * math.sqrt(3 / self.fields)
        scores: Array = self.bias + largest * (2 * hidden - 1).sum(axis=1)
        return scores

    def __repr__(self) -> str:
        return f"Clicks({self.samples} samples, {self.fields} fields, seed={self.seed})"


def _probabilities(scores: Array) -> Array:
    probabilities: Array = np.exp(-np.logaddexp(0, -scores))
    return probabilities


def clicks(
    samples: int = 220_000, fields: int = 8, *, test: int | float = 20_000, seed: int = 0
) -> tuple[Clicks, Clicks]:
    """Generate synthetic clicks as (training, test): the ids' effect on clicks is to be learned.

    Args:
        samples: total of both parts.
        fields: ids in a sample, each field with 10^11 ids of its own.
        test: the number of test samples, or (a float) their fraction.
        seed: decides all values; an integer of at least 0.
    Returns:
        Two data sets with x int64 [n, fields] and y int64 [n], 0 or 1. `bayes_loss` of the second
        is a lower bound for the expected loss of any model.
    Raises:
        UserError: an argument is out of range.

    Local. The same on every machine, except where rounding of `exp` and `log` turns an id into its
    neighbour.
    """
    samples = integer("samples", samples, 2)
    wanted = samples_to_test(test, samples)
    training = Clicks(samples - wanted, fields, seed=seed)
    return training, Clicks(wanted, fields, seed=seed, first=len(training))
