"""Rules that adjust the minibatch size and the learning rate to the progress of training.

The rules decide and change nothing: the session asks a rule, and carries out its decision. Source:
CNTK's AutoAdjust (SGD.cpp: SearchForBestMinibatchSize, and the learning rate adjustment after each
epoch). Two things differ: values that are not finite are always rejected, and a rollback restores
all state of the model and its place in the data.

Everything here is local, and the same on all ranks if the criteria are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ...options import Choice, Options, Real, Whole, option, options

STEP = math.sqrt(2)  #: ratio of two successive candidates
MULTIPLE = 64  #: all candidates but the first are multiples of this, or of a smaller base


@options
class AutoMinibatchSize(Options):
    """Tries larger minibatches from time to time, and keeps the largest that learns equally well.

    Every few epochs each candidate size trains from the same point on the next samples. Then all
    state is restored. The largest size with a training loss of at most (1 + margin) times that of
    the smallest size is kept.
    """

    minibatch_size_tuning_frequency: int = option(1, Whole(1), "epochs between two searches")
    minibatch_size_tuning_max: int = option(
        1024, Whole(1), "largest minibatch to be tried, in samples of all ranks"
    )
    trial_samples: int = option(
        2048,
        Whole(1),
        "samples of all ranks that each candidate trains on (at least 2 minibatches)",
    )
    minibatch_search_criterion_error_margin: float = option(
        0.01,
        Real(),
        "how much larger a candidate's loss may be than the smallest candidate's, as a fraction",
    )

    def candidates(self, base: int, size: int) -> list[int]:
        """Return the sizes to try, smallest first.

        Args:
            base: the least size, in samples of all ranks: the size at the beginning of training.
            size: the present size, in samples of all ranks.

        >>> AutoMinibatchSize(minibatch_size_tuning_max=512).candidates(64, 128)
        [64, 128, 192, 256]
        >>> AutoMinibatchSize().candidates(16, 16)
        [16, 32]
        """
        least, most = max(base, size // 2), min(self.minibatch_size_tuning_max, 2 * size)
        sizes, wanted, multiple = [least], least * STEP, min(base, MULTIPLE)
        while (rounded := max(round(wanted / multiple), 1) * multiple) <= most:
            if rounded > sizes[-1]:
                sizes.append(rounded)
            wanted *= STEP
        return sizes

    def search(self, sizes: list[int], trial: Callable[[int], float]) -> int:
        """Return the largest size that learns as well as the smallest.

        Args:
            sizes: the result of `candidates`.
            trial: returns the training loss of a size; the loss may be not finite.
        """
        base = trial(sizes[0])
        limit = base + self.minibatch_search_criterion_error_margin * abs(base)
        accepted = [size for size in sizes[1:] if trial(size) <= limit < math.inf]
        return max(accepted, default=sizes[0])


class Verdict(NamedTuple):
    """The decision about the learning rate.

    Attributes:
        factor: to be multiplied with the learning rate.
        roll_back: whether to restore the best model first.
    """

    factor: float
    roll_back: bool = False


@options
class AutoLearningRate(Options):
    """Lowers the learning rate after a small improvement, and raises it after a large one.

    After a step back, training continues from the best model. The rule looks at the session's
    criterion after each row, or after every few rows. The criterion is the loss of the
    cross-validation, or else the training loss.
    """

    learn_rate_adjust_interval: int = option(1, Whole(1), "rows of metrics between two adjustments")
    reduce_learn_rate_if_improve_less_than: float = option(
        0.0,
        Real(below=1),
        "the learning rate falls if the relative improvement of the criterion is below this",
    )
    learn_rate_decrease_factor: float = option(
        0.618, Real(positive=True, below=1), "factor on the learning rate if it falls"
    )
    increase_learn_rate_if_improve_more_than: float | None = option(
        None,
        Real(),
        "the learning rate rises if the relative improvement is above this (by default never)",
    )
    learn_rate_increase_factor: float = option(
        1.382, Real(least=1), "factor on the learning rate if it rises"
    )
    load_best_model: bool = option(
        True, Choice(True, False), "if the criterion became worse, restore the best model"
    )
    min_learn_rate: float = option(
        1e-9, Real(positive=True), "training ends if the learning rate falls below this"
    )

    def judge(self, before: float | None, now: float) -> Verdict:
        """Decide after a look at the criterion.

        Args:
            before: the criterion at the previous look, or of the model restored since. None: this
                is the first look.
            now: the criterion; may be not finite.

        >>> rule = AutoLearningRate(reduce_learn_rate_if_improve_less_than=0.01)
        >>> rule.judge(2.0, 1.99)
        Verdict(factor=0.618, roll_back=False)
        >>> rule.judge(2.0, math.nan)
        Verdict(factor=0.618, roll_back=True)
        """
        if not math.isfinite(now):
            return Verdict(self.learn_rate_decrease_factor, roll_back=True)
        if before is None:
            return Verdict(1.0)
        improvement = (before - now) / (abs(before) or 1.0)
        if improvement < 0 and self.load_best_model:
            return Verdict(self.learn_rate_decrease_factor, roll_back=True)
        if improvement < self.reduce_learn_rate_if_improve_less_than:
            return Verdict(self.learn_rate_decrease_factor)
        much = self.increase_learn_rate_if_improve_more_than
        if much is not None and improvement > much:
            return Verdict(self.learn_rate_increase_factor)
        return Verdict(1.0)
