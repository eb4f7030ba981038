"""What is learned: models, and minibatches that are the same for everybody, by rank and step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel_sgd.data import library_source
from parallel_sgd.models import MLP, ByteLanguageModel

Array = npt.NDArray[Any]

BATCH = 64  #: samples of each rank in a minibatch
SEED = 1  #: of the initial model and the samples' order, where none is said

INPUTS, CLASSES = 784, 10
SYNTHETIC = 1  #: minibatches of each rank, again and again: losses of two steps can be compared

CONTEXT = 8  #: bytes from which the next one is predicted
READ = 6_000_000  #: bytes of Python's library
STEPS = 4_000  #: minibatches of bytes, no sample twice
TESTED = 4_096  #: samples


@dataclass(frozen=True)
class Task:
    """
    Attributes:
        title: for people.
        model: with the initial parameters of `seed`, the same on every call.
        minibatches: x [steps, BATCH, inputs] and y [steps, BATCH] of a rank of so many, for a
            seed; step t takes the t-th, and after the last one the first.
        test: samples that nobody trains on; none where no test loss is asked for.
    """

    title: str
    model: Callable[..., MLP]
    minibatches: Callable[[int, int, int], tuple[Array, Array]]
    test: Callable[[], tuple[Array, Array]] | None = None


def _synthetic(rank: int, ranks: int, seed: int) -> tuple[Array, Array]:
    """Normal inputs, whose class is the largest of ten linear functions."""
    teacher = np.random.default_rng(seed).standard_normal((INPUTS, CLASSES), np.float32)
    random = np.random.default_rng((seed, rank))
    x = random.standard_normal((SYNTHETIC, BATCH, INPUTS), np.float32)
    return x, (x @ teacher).argmax(axis=-1)


def _bytes(rank: int, ranks: int, seed: int) -> tuple[Array, Array]:
    """Every rank's part of one order of the library's bytes."""
    train, _ = library_source(CONTEXT, most_bytes=READ)
    order = np.random.default_rng(seed).permutation(len(train))[: STEPS * ranks * BATCH]
    steps = len(order) // (ranks * BATCH)
    own = order[: steps * ranks * BATCH].reshape(steps, ranks, BATCH)[:, rank]
    x, y = train.read(own.reshape(-1), dtype=None)
    return x.reshape(steps, BATCH, CONTEXT), y.reshape(steps, BATCH)


def _bytes_tested() -> tuple[Array, Array]:
    _, test = library_source(CONTEXT, most_bytes=READ)
    return test.read(np.random.default_rng(SEED).permutation(len(test))[:TESTED], dtype=None)


def _mlp(width: int) -> Task:
    sizes = [INPUTS, width, width, CLASSES]
    return Task(f"MLP {'-'.join(map(str, sizes))}", partial(MLP, sizes, seed=SEED), _synthetic)


MODELS = {"5M": _mlp(1792), "24M": _mlp(4512)}
"""4.6 and 23.9 million parameters, most of them in one matrix."""

BYTES = "bytes"

TASKS = MODELS | {
    BYTES: Task(
        "next byte of Python's library, MLP 8x16-1024-1024-256",
        partial(ByteLanguageModel, CONTEXT, 16, [1024, 1024], seed=SEED),
        _bytes,
        _bytes_tested,
    )
}
