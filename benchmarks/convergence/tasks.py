"""The tasks: data, a model and a budget of samples, all drawn from a seed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from parallel_sgd.data import (
    Arrays,
    digits,
    library_sequences,
    library_source,
)
from parallel_sgd.models import MLP, ByteLanguageModel

from .task import Task, some_of

DIGITS_TESTED = 261  # leaves 1536 to train on: a whole number of minibatches for up to 64 ranks
CONTEXT = 8  #: bytes from which the next one is predicted
SEQUENCE = 64  #: bytes in a sample of PyTorch's models, each of which is predicted
BYTES_TESTED, SEQUENCES_TESTED = 4096, 512

_library = cache(partial(library_source, CONTEXT))
_library_sequences = cache(partial(library_sequences, SEQUENCE))


def _digits(seed: int, samples: int) -> tuple[Arrays, Arrays]:
    train, test = digits(test=DIGITS_TESTED, seed=seed)
    return Arrays(*train.arrays()), Arrays(*test.arrays())


def _bytes(seed: int, samples: int) -> tuple[Arrays, Arrays]:
    random = np.random.default_rng((seed, 2))
    train, test = (
        Arrays(*part.read(random.permutation(len(part))[:wanted], dtype=None))
        for part, wanted in zip(
            _library(most_bytes=3_000_000), (samples, BYTES_TESTED), strict=True
        )
    )
    return train, test


def _more_bytes(seed: int, samples: int) -> tuple[Arrays, Arrays]:
    return some_of(_library(most_bytes=6_000_000), (samples, BYTES_TESTED), seed)


def _sequences(seed: int, samples: int) -> tuple[Arrays, Arrays]:
    return some_of(_library_sequences(most_bytes=3_000_000), (samples, SEQUENCES_TESTED), seed)


def _torch_model(name: str, seed: int) -> Any:
    from .torch_trained import MODELS, from_seed

    return from_seed(seed, MODELS[name])


BYTES = Task(
    title="next byte of Python's library",
    samples=131_072,
    minibatch=16,
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


TRANSFORMER = Task(
    title="next byte, transformer of 0.24 million parameters",
    steps=1024,
    minibatch=8,
    classes=256,
    data=_sequences,
    model=partial(_torch_model, "transformer"),
    warm_up=1 / 16,
    torch=True,
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
        log_scale=True,  # losses differ most
    ),
    "bytes": BYTES,
    "bytes-256": _wider(256, 512, tuning_seeds=2),
    "bytes-256-long": _wider(256, 2048, tuning_seeds=1),
    "bytes-1024": _wider(1024, 512, tuning_seeds=1),
    "bytes-1024-long": _wider(1024, 2000, tuning_seeds=1),
    "transformer": TRANSFORMER,
    "transformer-5M": replace(
        TRANSFORMER,
        title="next byte, transformer of 4.9 million parameters",
        steps=512,
        model=partial(_torch_model, "transformer-5M"),
        points=8,
    ),
    "lstm": replace(
        TRANSFORMER,
        title="next byte, LSTM of 0.2 million parameters",
        model=partial(_torch_model, "lstm"),
    ),
}
