"""Tasks of PyTorch's models and optimizers. PyTorch is imported where one is carried out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from parallel_sgd import Algorithm, Communicator
from parallel_sgd.data import Dataset, Images, Subset, fashion_mnist, library_sequences
from parallel_sgd.schedules import Schedule

from .optimizers import Rule
from .task import ERROR, Held, Task, Trained, some_of

CONTEXT = 64
SEQUENCES_TESTED = 512
IMAGES = 59_904  # of 60,000: a whole number of minibatches of 128


class TorchTask(Task):
    """A task whose `model` is a PyTorch module."""

    @property
    def values(self) -> int:
        return sum(p.numel() for p in self.model(0).parameters())

    def trained(
        self, seed: int, rule: Rule, rate: Schedule, algorithm: Algorithm[Any], comm: Communicator
    ) -> Trained:
        from .torch_trained import TorchModel

        return TorchModel(lambda: self.model(seed), rule, rate, algorithm, comm)


def _transformer(seed: int) -> Any:
    from parallel_sgd.torch.models import ByteTransformer

    from .torch_trained import from_seed

    return from_seed(seed, lambda: ByteTransformer(64, layers=4, heads=4, context=CONTEXT))


def _lstm(seed: int) -> Any:
    from .torch_trained import ByteLSTM, from_seed

    return from_seed(seed, lambda: ByteLSTM(128))


def _resnet(seed: int) -> Any:
    from parallel_sgd.torch.models import ResNet

    from .torch_trained import from_seed

    return from_seed(seed, ResNet)


@cache
def _library(most_bytes: int) -> tuple[Dataset, Dataset]:
    return library_sequences(CONTEXT, most_bytes=most_bytes)


@cache
def _clothing() -> tuple[Images, Images]:
    return fashion_mnist()


def _sequences(seed: int, samples: int) -> tuple[Held, Held]:
    return some_of(_library(3_000_000), (samples, SEQUENCES_TESTED), seed)


def _more_sequences(seed: int, samples: int) -> tuple[Held, Held]:
    return some_of(_library(12_000_000), (samples, SEQUENCES_TESTED), seed)


def _images(seed: int, samples: int) -> tuple[Dataset, Dataset]:
    training, test = _clothing()
    random = np.random.default_rng((seed, 2))
    return Subset(training, random.permutation(len(training))[:IMAGES]), test


TRANSFORMER = TorchTask(
    title="next byte, transformer of 0.24 million parameters",
    steps=1024,
    minibatch=8,
    margin=0.02,
    tuning_seeds=1,
    classes=256,
    data=_sequences,
    model=_transformer,
    warm_up=1 / 16,
)

TORCH_TASKS: dict[str, Task] = {
    "transformer": TRANSFORMER,
    "fashion-mnist": TorchTask(
        title="Fashion-MNIST, ResNet of 0.17 million parameters",
        steps=936,  # two epochs
        minibatch=32,
        margin=0.2,
        tuning_seeds=1,
        classes=10,
        data=_images,
        model=_resnet,
        warm_up=1 / 16,
        points=4,
        measure=ERROR,
    ),
    "lstm": replace(TRANSFORMER, title="next byte, LSTM of 0.2 million parameters", model=_lstm),
    "transformer-long": replace(TRANSFORMER, steps=4096, data=_more_sequences),
}
"""A sample of bytes is a sequence of 64 bytes, each of which is predicted."""
