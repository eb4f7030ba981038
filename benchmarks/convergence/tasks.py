"""What is learned: data, a model and a budget of samples, all drawn from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from parallel_sgd.data import Dataset, digits, library_source
from parallel_sgd.models import MLP, ByteLanguageModel

DIGITS_TESTED = 261  # leaves 1536 to train on: a whole number of minibatches for up to 64 ranks
CONTEXT = 8
BYTES_TESTED = 4096


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


@dataclass(frozen=True)
class Task:
    """
    Attributes:
        title: for people.
        minibatch: samples of each rank in a minibatch.
        margin: of equivalence, in nats.
        tuning_seeds: how many rates are chosen on; more where seeds differ more.
        classes: that the model tells apart.
        data: (training, test) for a seed and a budget of samples.
        model: for a seed.
        samples: of all ranks in a run, on however many; or else
        steps: in a run, each of a minibatch of every rank.
        block: minibatches in a block, where ranks train alone.
        warm_up: the part of a run in which the rate rises, from a tenth of the highest.
        points: equally distant moments at which the test loss is taken; blocks of all K end there.
    """

    title: str
    minibatch: int
    margin: float
    tuning_seeds: int
    classes: int
    data: Callable[[int, int], tuple[Held, Held]]
    model: Callable[[int], MLP]
    samples: int = 0
    steps: int = 0
    block: int = 8
    warm_up: float = 0.0
    points: int = 16

    @property
    def ceiling(self) -> float:
        """The loss of knowing nothing: runs that end above, or not at all, count as this."""
        return math.log(self.classes)

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


def _digits(seed: int, samples: int) -> tuple[Held, Held]:
    train, test = digits(test=DIGITS_TESTED, seed=seed)
    return Held(*train.arrays()), Held(*test.arrays())


def _bytes(seed: int, samples: int) -> tuple[Held, Held]:
    random = np.random.default_rng((seed, 2))
    train, test = _library(3_000_000)
    held = []
    for part, wanted in ((train, samples), (test, BYTES_TESTED)):
        x, y = part.read(random.permutation(len(part))[:wanted], dtype=None)
        held.append(Held(x, y))
    return held[0], held[1]


def _more_bytes(seed: int, samples: int) -> tuple[Held, Held]:
    random = np.random.default_rng((seed, 2))
    train, test = (
        part.read(random.choice(len(part), wanted, replace=False, shuffle=False), dtype=None)
        for part, wanted in zip(_library(6_000_000), (samples, BYTES_TESTED), strict=True)
    )
    return Held(*train), Held(*test)


@cache
def _library(most_bytes: int) -> tuple[Dataset, Dataset]:
    return library_source(CONTEXT, most_bytes=most_bytes)


BYTES = Task(
    title="next byte of Python's library",
    samples=131_072,
    minibatch=16,
    margin=0.02,
    tuning_seeds=2,
    classes=256,
    data=_bytes,
    model=lambda seed: ByteLanguageModel(CONTEXT, 8, [64], seed=seed),
)


def _wider(hidden: int, steps: int, tuning_seeds: int) -> Task:
    """A larger model of the same, on larger minibatches, for so many steps whatever K."""
    return replace(
        BYTES,
        title=f"next byte, hidden layers of {hidden}",
        samples=0,
        steps=steps,
        minibatch=64,
        tuning_seeds=tuning_seeds,
        data=_more_bytes,
        model=lambda seed: ByteLanguageModel(CONTEXT, 16, [hidden, hidden], seed=seed),
        warm_up=1 / 16,
        points=8,
    )


TASKS = {
    "digits": Task(
        title="digits, MLP 64-128-10",
        samples=65_536,
        minibatch=8,
        margin=0.01,
        tuning_seeds=6,
        classes=10,
        data=_digits,
        model=lambda seed: MLP([64, 128, 10], seed=seed),
    ),
    "bytes": BYTES,
    "bytes-256": _wider(256, 512, tuning_seeds=2),
    "bytes-1024": _wider(1024, 512, tuning_seeds=1),
    "bytes-1024-long": _wider(1024, 2000, tuning_seeds=1),
}
