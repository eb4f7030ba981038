"""What the ranks train on: layouts, codecs, optimizers, and data that differ on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel_sgd import SGD, Adam, Communicator, MomentumSGD, NesterovSGD, Parameters
from parallel_sgd.compression import Mixed, codec_for
from parallel_sgd.patterns import Patterns
from parallel_sgd.schedules import Linear, Steps

Array = np.ndarray

LAYOUTS: dict[str, dict[str, tuple[int, ...]]] = {
    "matrix and bias": {"W": (40, 30), "b": (30,)},
    "large and small": {"a": (700,), "b": (3,), "c": (129,), "d": (2, 2), "e": (64,)},
    "many small": {f"p{i}": (i % 7 + 1,) for i in range(90)},
    "one block": {"w": (60,)},  # all but one rank own nothing
    "two values": {"v": (1,), "w": (1,)},  # fewer than ranks
    "no values": {"w": (0, 3)},
    "long": {"a": (90, 100), "b": (33,)},  # more than 32 KiB
}

BLOCK_SIZE = 64

CODECS = {
    "1 bit": codec_for(1, code="sign", block_size=BLOCK_SIZE),
    "1 bit, mean": codec_for(1, code="sign", block_size=BLOCK_SIZE, threshold="mean"),
    "4 bits": codec_for(4, block_size=BLOCK_SIZE),
    "8 bits": codec_for(8, block_size=BLOCK_SIZE),
    "top-k": codec_for(1, code="top-k", block_size=BLOCK_SIZE),
    "float16": codec_for(16, block_size=BLOCK_SIZE),
    "bfloat16": codec_for(16, block_size=BLOCK_SIZE, half_format="bfloat16"),
    "32 bits": codec_for(32, block_size=BLOCK_SIZE),
    "mixed": Mixed(
        others=codec_for(1, code="sign", block_size=BLOCK_SIZE),
        own=Patterns(
            {
                pattern: codec_for(bits, block_size=BLOCK_SIZE)
                for pattern, bits in {"b": 32, "<4": 16, "[ce]": 8, "p1*": 4}.items()
            }
        ),
    ),
}

OPTIMIZERS = {
    "SGD": SGD(lr=0.2),
    "SGD per sample": SGD(lr_per_sample=0.02),
    "SGD, scheduled": SGD(lr=Steps({0: 0.3, 40: 0.1})),
    "momentum": MomentumSGD(lr=0.1, momentum=0.9),
    "momentum, unit gain": MomentumSGD(lr=0.5, momentum_time_constant=50, unit_gain=True),
    "Nesterov": NesterovSGD(lr=Linear({0: 0.0, 50: 0.1}), momentum_time_constant=100),
    "Adam": Adam(lr=0.01),
    "AdamW": Adam(lr=0.01, weight_decay=0.1, epsilon=1e-4),
}


GATHERS = SGD(lr_per_sample=1.0)
"""From zeros on, parameters become minus the sum of all gradients."""


def zeros(layout: str, dtype: Any = np.float32) -> Parameters:
    return Parameters({name: np.zeros(shape, dtype) for name, shape in LAYOUTS[layout].items()})


def gradient_of(rank: int, step: int, n: int, dtype: Any = np.float32) -> Array:
    """What a rank gives to a sum: every rank has other values, of another size and mean."""
    noise = np.random.default_rng([7, rank, step]).standard_normal(n)
    return ((1 + rank) * noise + 0.3 * rank - 0.2).astype(dtype)


def samples_of(rank: int, step: int) -> int:
    """How many samples a rank has in a minibatch: uneven, often none, in step 4 none anywhere."""
    return 0 if step == 4 else (3, 0, 5, 1)[(rank + step) % 4]


def minibatch_of(rank: int, step: int) -> tuple[Array, Array]:
    """x float64 [m, 6] and y [m] of a rank, m uneven and sometimes 0."""
    m = (3 * rank + 2 * step + 1) % 5
    random = np.random.default_rng([8, rank, step])
    return random.standard_normal((m, 6)) + rank, random.integers(0, 4, m)


def few_ranks_but(kept: Iterable[str], names: Iterable[str]) -> list[Any]:
    """For `parametrize`: all names, marked `few_ranks` but for those to be kept."""
    kept, names = set(kept), list(names)
    assert kept <= set(names)
    return [
        name if name in kept else pytest.param(name, marks=pytest.mark.few_ranks) for name in names
    ]


@contextmanager
def case(*names: Any) -> Iterator[None]:
    """One of the cases that a test goes through: an error says which it was.

    Where a case takes less than the end of a test, at which all ranks wait for each other.
    """
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case of {', '.join(map(str, names))}")
        raise


def shared(comm: Communicator, tmp_path: Path) -> Path:
    """Rank 0's folder: under MPI every rank has a `tmp_path` of its own."""
    return comm.allgather_object(tmp_path)[0]
