"""Tasks: data and a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel_sgd.data import Arrays, Dataset

Score = tuple[float, float]  #: mean loss over the samples in nats; wrong samples in %


def some_of(
    parts: tuple[Dataset, Dataset], wanted: tuple[int, int], seed: int
) -> tuple[Arrays, Arrays]:
    """Draw samples of a training and a test set from a seed, as many as wanted of each."""
    random = np.random.default_rng((seed, 2))
    train, test = (
        part.read(random.choice(len(part), count, replace=False, shuffle=False), dtype=None)
        for part, count in zip(parts, wanted, strict=True)
    )
    return Arrays(*train), Arrays(*test)


@dataclass(frozen=True)
class Task:
    """
    Attributes:
        title: for people.
        minibatch: samples of each rank in a minibatch.
        classes: of the labels.
        data: (training, test) for a seed and a budget of samples.
        model: for a seed; of `parallel_sgd`, or a PyTorch module.
        margin: of equivalence, in nats.
        tuning_seeds: how many rates are chosen on; more if seeds differ more.
        samples: of all ranks in a run, for any number of ranks; or else
        steps: in a run, each of a minibatch of every rank.
        warm_up: the part of a run with a rising rate, from a tenth of the highest.
        points: equally distant tests of the model; blocks of all K end there.
        log_scale: of the loss in figures.
        torch: whether the model is a PyTorch module.
    """

    title: str
    minibatch: int
    classes: int
    data: Callable[[int, int], tuple[Dataset, Dataset]]
    model: Callable[[int], Any]
    margin: float = 0.02
    tuning_seeds: int = 1
    samples: int = 0
    steps: int = 0
    warm_up: float = 0.0
    points: int = 16
    log_scale: bool = False
    torch: bool = False

    @property
    def worst(self) -> Score:
        """The score of knowing nothing, and of runs that end above or diverge."""
        return math.log(self.classes), 100 * (1 - 1 / self.classes)

    @property
    def values(self) -> int:
        """The number of the model's values."""
        model = self.model(0)
        if self.torch:
            return sum(p.numel() for p in model.parameters())
        return int(model.parameters.flat.size)

    def budget(self, ranks: int) -> int:
        """Return the samples of all ranks in a run."""
        return self.samples or self.steps * self.minibatch * ranks

    def steps_on(self, ranks: int) -> int:
        """Return the minibatches of every rank in a run."""
        return self.budget(ranks) // (self.minibatch * ranks)
