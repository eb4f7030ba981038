"""A model on one of the ranks that train it together: one step, and what it has learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from parallel_sgd import Algorithm, Communicator, Learner, Optimizer
from parallel_sgd.data import Dataset

Array = Any


@dataclass(frozen=True)
class Score:
    """
    Attributes:
        loss: mean over the samples, in nats.
        error: of 100 samples, so many are wrong.
    """

    loss: float
    error: float


class Trained(Protocol):
    @property
    def learner(self) -> Learner:
        """Of this rank."""

    def step(self, x: Array, y: Array) -> None:
        """Train on a minibatch. Collective."""

    def score(self, test: Dataset) -> Score | None:
        """Of what all ranks have in common, on rank 0; None elsewhere. Collective."""


class ArrayModel:
    """A model of `parallel_sgd`'s."""

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
