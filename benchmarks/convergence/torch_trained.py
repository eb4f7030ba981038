"""A PyTorch model in training on a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import parallel_sgd.torch
from parallel_sgd import Algorithm, Communicator
from parallel_sgd.data import Dataset
from parallel_sgd.schedules import Schedule
from parallel_sgd.torch.models import ByteTransformer

from .optimizers import Rule
from .task import Score

Array = Any

TESTED_AT_A_TIME = 250
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  #: of all models

_one_at_a_time = threading.Lock()
"""Held by the rank that computes: ranks are threads, which else drive each other from the cache."""


def from_seed(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model with initial values drawn from a seed. PyTorch's generator stays unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


class ByteLSTM(nn.Module):
    """An LSTM (Hochreiter and Schmidhuber, 1997) over embedded bytes.

    Args:
        width: of the embedding and of the LSTM's state.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [n, bytes, 256] of the byte after each of x [n, bytes]."""
        states, _ = self.lstm(self.embedding(x))
        return self.head(states)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": lambda: ByteTransformer(64, layers=4, heads=4, context=64),
    "transformer-5M": lambda: ByteTransformer(256, layers=6, heads=8, context=64),
    "lstm": lambda: ByteLSTM(128),
}


class TorchModel:
    """A model with PyTorch's optimizer of a rule, at rates by the samples of all ranks."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        rule: Rule,
        rate: Schedule,
        algorithm: Algorithm[Any],
        comm: Communicator,
    ) -> None:
        self.rate = rate
        with _one_at_a_time:  # they draw from one generator
            self.model = make().to(DEVICE)
        optimizer = getattr(torch.optim, rule.torch_name)
        self.optimizer = optimizer(self.model.parameters(), lr=rate(0), **rule.torch_options)
        self.learner = parallel_sgd.torch.Learner(self.model, self.optimizer, algorithm, comm)

    def step(self, x: Array, y: Array) -> None:
        """Train on a minibatch. Collective."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.learner.samples)
        with _one_at_a_time:
            _loss(self.model(_there(x)), _there(y)).backward()
        self.learner.step(samples=len(x))

    def score(self, test: Dataset) -> Score | None:
        """Score the model; each rank tests a part. Returns None on ranks but 0. Collective."""
        means = self.learner.evaluate(_part(test, self.learner.comm), _score)
        return None if self.learner.comm.rank else (means["loss"], means["error"])


def _loss(logits: Any, y: Any) -> Any:
    """Return the mean over all places [n, …] of logits [n, …, classes]."""
    return functional.cross_entropy(logits.flatten(0, -2), y.flatten())


def _score(model: nn.Module, x: Any, y: Any) -> dict[str, float]:
    with _one_at_a_time:
        logits = model(x)
        wrong = (logits.argmax(-1) != y).float().mean()
        return {"loss": _loss(logits, y).item(), "error": 100 * wrong.item()}


def _part(test: Dataset, comm: Communicator) -> Iterator[tuple[Any, Any]]:
    own = np.arange(comm.rank, len(test), comm.size)
    for begin in range(0, len(own), TESTED_AT_A_TIME):
        x, y = test.read(own[begin : begin + TESTED_AT_A_TIME], dtype=None)
        yield _there(x), _there(y)


def _there(array: Array) -> torch.Tensor:
    return torch.from_numpy(array).to(DEVICE)
