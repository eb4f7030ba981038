"""Tasks: data, a model, and a measure of the result."""

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
    """A quantity in which contenders are compared: less is better."""

    name: str
    unit: str


LOSS = Measure("test loss", "nats")
ERROR = Measure("test error", "%")


class Held(Dataset):
    """Checked samples in memory. Reading costs next to nothing: a simulated run reads a thousand
    times a second."""

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
    """Draw samples of a training and a test set from a seed, as many as wanted of each."""
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
        error: wrong samples in %.
    """

    loss: float
    error: float


class Trained(Protocol):
    @property
    def learner(self) -> Learner:
        """The learner of this rank."""

    def step(self, x: Array, y: Array) -> None:
        """Train on a minibatch. Collective."""

    def score(self, test: Dataset) -> Score | None:
        """Score the common model on rank 0; return None on all more ranks. Collective."""


class ArrayModel:
    """A model of `parallel_sgd`."""

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
        tuning_seeds: how many rates are chosen on; more if seeds differ more.
        classes: of the labels.
        data: (training, test) for a seed and a budget of samples.
        model: for a seed; here a model of `parallel_sgd`.
        samples: of all ranks in a run, for any number of ranks; or else
        steps: in a run, each of a minibatch of every rank.
        block: minibatches in a block of local updates.
        warm_up: the part of a run with a rising rate, from a tenth of the highest.
        points: equally distant tests of the model; blocks of all K end there.
        measure: for comparisons; rates are chosen by the loss.
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
        """The loss of knowing nothing, and of runs that end above or diverge."""
        return math.log(self.classes)

    @property
    def worst(self) -> float:
        """The measure of knowing nothing."""
        return self.ceiling if self.measure == LOSS else 100 * (1 - 1 / self.classes)

    @property
    def values(self) -> int:
        """The number of the model's values."""
        return int(self.model(0).parameters.flat.size)

    def trained(
        self, seed: int, rule: Rule, rate: Schedule, algorithm: Algorithm[Any], comm: Communicator
    ) -> Trained:
        """Make the model for a seed on a rank. Collective."""
        return ArrayModel(self.model(seed), rule.make(rate), algorithm, comm)

    def budget(self, ranks: int) -> int:
        """Return the samples of all ranks in a run."""
        return self.samples or self.steps * self.minibatch * ranks

    def steps_on(self, ranks: int) -> int:
        """Return the minibatches of every rank in a run."""
        return self.budget(ranks) // (self.minibatch * ranks)

    def shortened(self, times: int, tuning_seeds: int | None) -> Task:
        """Divide samples or steps by `times`, and replace the number of tuning seeds if given."""
        return replace(
            self,
            samples=self.samples // times,
            steps=self.steps // times // self.points * self.points,
            tuning_seeds=tuning_seeds or self.tuning_seeds,
        )
