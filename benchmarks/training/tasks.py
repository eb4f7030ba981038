"""Tasks: models, and minibatches by rank and step, the same for all contenders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from parallel_sgd.data import library_sequences, library_source
from parallel_sgd.models import MLP, ByteLanguageModel

if TYPE_CHECKING:
    from torch import nn

Array = npt.NDArray[Any]

BATCH = 64  #: samples of each rank in a minibatch
SEED = 1  #: of the initial model and the samples' order, where none is said

INPUTS, CLASSES = 784, 10
SYNTHETIC = 1  #: minibatches of each rank, again and again: losses of two steps can be compared

CONTEXT = 8  #: bytes from which the next one is predicted
READ = 6_000_000  #: bytes of Python's library
STEPS = 4_000  #: minibatches of bytes, no sample twice
TESTED = 4_096  #: samples

SEQUENCE = 64  #: bytes, each of which a transformer predicts
SEQUENCES = 8  #: of each rank in a minibatch of its
SEQUENCES_TESTED = 256
SIDE = 28  #: of an image


@dataclass(frozen=True)
class Task:
    """
    Attributes:
        model: with the initial parameters of `seed`, the same on every call.
        minibatches: x [steps, batch, inputs] and y [steps, batch] for rank, ranks and seed; step t
            takes the t-th minibatch, and after the last the first again.
        test: samples for the test loss; None without a test loss.
        batch: samples of each rank in a minibatch.
    """

    model: Callable[..., MLP | nn.Module]
    minibatches: Callable[[int, int, int], tuple[Array, Array]]
    test: Callable[[], tuple[Array, Array]] | None = None
    batch: int = BATCH

    def test_loss(self, values: Array, x: Array, y: Array) -> float:
        """Return the test loss of a model with these parameters, in nats, for both sides."""
        model = self.model()
        if isinstance(model, MLP):
            model.parameters.flat[...] = values
            return model.evaluate(x, y)[0]
        from .modules import test_loss

        return test_loss(model, values, x, y)


def _synthetic(rank: int, ranks: int, seed: int) -> tuple[Array, Array]:
    """Return normal inputs with the largest of ten linear functions as class."""
    teacher = np.random.default_rng(seed).standard_normal((INPUTS, CLASSES), np.float32)
    random = np.random.default_rng((seed, rank))
    x = random.standard_normal((SYNTHETIC, BATCH, INPUTS), np.float32)
    return x, (x @ teacher).argmax(axis=-1)


def _bytes(steps: int, rank: int, ranks: int, seed: int) -> tuple[Array, Array]:
    """Return a rank's part of an order of the library's bytes."""
    train, _ = library_source(CONTEXT, most_bytes=READ)
    own = _order(len(train), steps, rank, ranks, BATCH, seed)
    x, y = train.read(own.reshape(-1), dtype=None)
    return x.reshape(*own.shape, CONTEXT), y.reshape(own.shape)


def _bytes_tested() -> tuple[Array, Array]:
    _, test = library_source(CONTEXT, most_bytes=READ)
    return test.read(np.random.default_rng(SEED).permutation(len(test))[:TESTED], dtype=None)


def _images(rank: int, ranks: int, seed: int) -> tuple[Array, Array]:
    """Return the synthetic inputs as images."""
    x, y = _synthetic(rank, ranks, seed)
    return x.reshape(SYNTHETIC, BATCH, 1, SIDE, SIDE), y


def _sequences(steps: int, rank: int, ranks: int, seed: int, many: int = 1) -> tuple[Array, Array]:
    """Return a rank's part of an order of the library's sequences: x and y [steps, n, SEQUENCE].

    Args:
        many: times as many sequences in a minibatch.
    """
    train, _ = library_sequences(SEQUENCE, most_bytes=READ)
    own = _order(len(train), steps, rank, ranks, many * SEQUENCES, seed)
    x, y = train.read(own.reshape(-1))
    return x.reshape(*own.shape, SEQUENCE), y.reshape(*own.shape, SEQUENCE)


def _order(size: int, steps: int, rank: int, ranks: int, batch: int, seed: int) -> Array:
    """Return a rank's samples of an order of `size`, of several if one is too short: [steps,
    batch]."""
    random, wanted = np.random.default_rng(seed), steps * ranks * batch
    orders = [random.permutation(size) for _ in range(-(-wanted // size))]
    return np.concatenate(orders)[:wanted].reshape(steps, ranks, batch)[:, rank]


def _sequences_tested() -> tuple[Array, Array]:
    _, test = library_sequences(SEQUENCE, most_bytes=READ)
    return test.read(np.random.default_rng(SEED).permutation(len(test))[:SEQUENCES_TESTED])


def _transformer(width: int, layers: int, heads: int, seed: int = SEED) -> nn.Module:
    import torch

    from parallel_sgd.torch.models import ByteTransformer

    torch.manual_seed(seed)
    return ByteTransformer(width, layers, heads, context=SEQUENCE)


def _resnet(seed: int = SEED) -> nn.Module:
    import torch

    from parallel_sgd.torch.models import ResNet

    torch.manual_seed(seed)
    return ResNet()


def _mlp(width: int) -> Task:
    return Task(partial(MLP, [INPUTS, width, width, CLASSES], seed=SEED), _synthetic)


MODELS = {"5M": _mlp(1792), "24M": _mlp(4512)}
"""4.6 and 23.9 million parameters, most of them in one matrix."""

BYTES = "bytes"

MODULES = MODELS | {
    "transformer": Task(
        partial(_transformer, width=256, layers=6, heads=4),
        partial(_sequences, SYNTHETIC),
        batch=SEQUENCES,
    ),
    "ResNet": Task(_resnet, _images),
}
"""The same, and of PyTorch alone: 4.9 million parameters in 77 tensors, and 0.2 in 47 behind
convolutions."""

TEXT = "text"

SMALL = "small"  #: that everything is loaded once it has been trained

MANY = "transformer, 2048 bytes a step"

TASKS = MODULES | {
    MANY: replace(
        MODULES["transformer"], minibatches=partial(_sequences, SYNTHETIC, many=4), batch=32
    ),
    SMALL: _mlp(16),
    TEXT: Task(
        partial(_transformer, width=96, layers=2, heads=4),
        partial(_sequences, STEPS),
        _sequences_tested,
        batch=SEQUENCES,
    ),
    BYTES: Task(
        partial(ByteLanguageModel, CONTEXT, 16, [1024, 1024], seed=SEED),
        partial(_bytes, STEPS),
        _bytes_tested,
    ),
}
