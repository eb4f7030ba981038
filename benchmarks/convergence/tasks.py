"""The tasks: data, a model and a budget of samples, all drawn from a seed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from parallel_sgd.data import Dataset, digits, library_source
from parallel_sgd.models import MLP, ByteLanguageModel

from .task import Held, Task, some_of
from .torch_tasks import TORCH_TASKS

DIGITS_TESTED = 261  # leaves 1536 to train on: a whole number of minibatches for up to 64 ranks
CONTEXT = 8
BYTES_TESTED = 4096


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
    return some_of(_library(6_000_000), (samples, BYTES_TESTED), seed)


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


TASKS: dict[str, Task] = {
    "digits": Task(
        title="digits, MLP 64-128-10",
        samples=65_536,
        minibatch=8,
        margin=0.01,
        tuning_seeds=6,
        classes=10,
        data=_digits,
        model=lambda seed: MLP([64, 128, 10], seed=seed),
        log_scale=True,  # losses differ most
    ),
    "bytes": BYTES,
    "bytes-256": _wider(256, 512, tuning_seeds=2),
    "bytes-1024": _wider(1024, 512, tuning_seeds=1),
    "bytes-1024-long": _wider(1024, 2000, tuning_seeds=1),
    **TORCH_TASKS,
}
