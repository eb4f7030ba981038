"""What is learned, and what of it is compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from parallel_sgd import Algorithm, Communicator, Learner, Optimizer
from parallel_sgd.data import Dataset
from parallel_sgd.schedules import Schedule

from .optimizers import Rule

Array = Any


@dataclass(frozen=True)
class Measure:
    """What contenders are compared by: less is better."""

    name: str
    unit: str


LOSS = Measure("test loss", "nats")
ERROR = Measure("test error", "%")


class Held(Dataset):
    """Samples in memory that have been checked before, so that reading them costs next to nothing:
    a simulated run does so a thousand times a second."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def read(
        self, indexes: Any, *, dtype: Any = None, classes: int | None = None
    ) -> tuple[Any, Any]:
        return self.x[indexes], self.y[indexes]

    def __repr__(self) -> str:
        return f"Held({len(self)} samples)"


def some_of(
    parts: tuple[Dataset, Dataset], wanted: tuple[int, int], seed: int
) -> tuple[Held, Held]:
    """So many samples of a training and a test set, drawn from a seed."""
    random = np.random.default_rng((seed, 2))
    train, test = (
        part.read(random.choice(len(part), count, replace=False, shuffle=False), dtype=None)
        for part, count in zip(parts, wanted, strict=True)
    )
    return Held(*train), Held(*test)


@dataclass(frozen=True)
class Score:
    """
    Attributes:
        loss: mean over the samples, in nats.
        error: of 100 samples, so many are wrong.
    """

    loss: float
    error: float


class Trained(Protocol):
    @property
    def learner(self) -> Learner:
        """Of this rank."""

    def step(self, x: Array, y: Array) -> None:
        """Train on a minibatch. Collective."""

    def score(self, test: Dataset) -> Score | None:
        """Of what all ranks have in common, on rank 0; None elsewhere. Collective."""


class ArrayModel:
    """A model of `parallel_sgd`'s."""

    def __init__(
        self, model: Any, optimizer: Optimizer, algorithm: Algorithm[Any], comm: Communicator
    ) -> None:
        self.model = model
        self.learner = Learner(model.parameters, optimizer, algorithm, comm)

    def step(self, x: Array, y: Array) -> None:
        self.model.gradient(x, y, out=self.learner.gradient)
        self.learner.step(samples=len(x))

    def score(self, test: Dataset) -> Score | None:
        self.learner.meet()
        if self.learner.comm.rank:
            return None
        with self.learner.shared_model():
            loss, accuracy = self.model.evaluate(*test.arrays())
        return Score(loss, 100 * (1 - accuracy))


@dataclass(frozen=True)
class Task:
    """
    Attributes:
        title: for people.
        minibatch: samples of each rank in a minibatch.
        margin: of equivalence, in the unit of `measure`.
        tuning_seeds: how many rates are chosen on; more where seeds differ more.
        classes: that the model tells apart.
        data: (training, test) for a seed and a budget of samples.
        model: for a seed; here one of `parallel_sgd`'s.
        samples: of all ranks in a run, on however many; or else
        steps: in a run, each of a minibatch of every rank.
        block: minibatches in a block, where ranks train alone.
        warm_up: the part of a run in which the rate rises, from a tenth of the highest.
        points: equally distant moments at which the test loss is taken; blocks of all K end there.
        measure: by which contenders are compared; rates are chosen by the loss.
        log_scale: of the measure in figures.
    """

    title: str
    minibatch: int
    margin: float
    tuning_seeds: int
    classes: int
    data: Callable[[int, int], tuple[Dataset, Dataset]]
    model: Callable[[int], Any]
    samples: int = 0
    steps: int = 0
    block: int = 8
    warm_up: float = 0.0
    points: int = 16
    measure: Measure = LOSS
    log_scale: bool = False

    @property
    def ceiling(self) -> float:
        """The loss of knowing nothing: runs that end above, or not at all, count as this."""
        return math.log(self.classes)

    @property
    def worst(self) -> float:
        """What `measure` says of knowing nothing."""
        return self.ceiling if self.measure == LOSS else 100 * (1 - 1 / self.classes)

    @property
    def values(self) -> int:
        """Of the model."""
        return int(self.model(0).parameters.flat.size)

    def trained(
        self, seed: int, rule: Rule, rate: Schedule, algorithm: Algorithm[Any], comm: Communicator
    ) -> Trained:
        """The model for a seed on one of the ranks that train it. Collective."""
        return ArrayModel(self.model(seed), rule.make(rate), algorithm, comm)

    def budget(self, ranks: int) -> int:
        """Samples of all ranks in a run."""
        return self.samples or self.steps * self.minibatch * ranks

    def steps_on(self, ranks: int) -> int:
        """Minibatches of every rank in a run."""
        return self.budget(ranks) // (self.minibatch * ranks)

    def shortened(self, times: int, tuning_seeds: int | None) -> Task:
        """With so many times fewer samples or steps, tuned on so many seeds if given."""
        return replace(
            self,
            samples=self.samples // times,
            steps=self.steps // times // self.points * self.points,
            tuning_seeds=tuning_seeds or self.tuning_seeds,
        )
