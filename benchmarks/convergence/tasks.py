"""What is learned: data, a model and a budget of samples, all drawn from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from parallel_sgd.data import Dataset, digits, library_source
from parallel_sgd.models import MLP, ByteLanguageModel

POINTS = 16
"""At so many equally distant moments the test loss is taken; blocks of all K end there."""

DIGITS_TESTED = 261  # leaves 1536 to train on: a whole number of minibatches for up to 64 ranks
BYTES_READ, CONTEXT = 3_000_000, 8
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
        samples: of all ranks, in a run; a multiple of `POINTS` blocks of 64 ranks.
        minibatch: samples of each rank in a minibatch.
        block: minibatches in a block.
        margin: of equivalence, in nats.
        tuning_seeds: how many rates are chosen on; more where seeds differ more.
        classes: that the model tells apart.
        data: (training, test) for a seed and a budget of samples.
        model: for a seed.
    """

    title: str
    samples: int
    minibatch: int
    block: int
    margin: float
    tuning_seeds: int
    classes: int
    data: Callable[[int, int], tuple[Held, Held]]
    model: Callable[[int], MLP]

    @property
    def ceiling(self) -> float:
        """The loss of knowing nothing: runs that end above, or not at all, count as this."""
        return math.log(self.classes)


def _digits(seed: int, samples: int) -> tuple[Held, Held]:
    train, test = digits(test=DIGITS_TESTED, seed=seed)
    return Held(*train.arrays()), Held(*test.arrays())


def _bytes(seed: int, samples: int) -> tuple[Held, Held]:
    random = np.random.default_rng((seed, 2))
    train, test = _library()
    held = []
    for part, wanted in ((train, samples), (test, BYTES_TESTED)):
        x, y = part.read(random.permutation(len(part))[:wanted], dtype=None)
        held.append(Held(x, y))
    return held[0], held[1]


@cache
def _library() -> tuple[Dataset, Dataset]:
    return library_source(CONTEXT, most_bytes=BYTES_READ)


TASKS = {
    "digits": Task(
        title="digits, MLP 64-128-10",
        samples=65_536,
        minibatch=8,
        block=8,
        margin=0.01,
        tuning_seeds=6,
        classes=10,
        data=_digits,
        model=lambda seed: MLP([64, 128, 10], seed=seed),
    ),
    "bytes": Task(
        title="next byte of Python's library",
        samples=131_072,
        minibatch=16,
        block=8,
        margin=0.02,
        tuning_seeds=2,
        classes=256,
        data=_bytes,
        model=lambda seed: ByteLanguageModel(CONTEXT, 8, [64], seed=seed),
    ),
}
