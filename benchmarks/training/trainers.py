"""Our trainer of our own models; and the methods of all trainers."""

from __future__ import annotations

import math
from typing import Any, Protocol

from parallel_sgd import Algorithm, Communicator, Learner, MomentumSGD, UserError
from parallel_sgd.models import MLP

from .contenders import CONTENDERS, MOMENTUM
from .tasks import TASKS, Array


class Trainer(Protocol):
    """A contender's model in training on this rank."""

    def step(self, x: Array, y: Array) -> float:
        """Train on this rank's minibatch; return the mean loss before the step, not finite after
        divergence."""

    def values(self) -> Array:
        """Return the parameters as a vector, in the order and shapes of our models."""

    def finish(self) -> None:
        """Complete all work under way. Collective."""


class Ours:
    """Our model, our learner and the loop around them, as a program of a user would have."""

    def __init__(self, comm: Communicator, name: str, task: str, lr: float, seed: int) -> None:
        chosen = CONTENDERS[name]
        assert chosen.algorithm is not None
        among = comm if chosen.period else Communicator.single()
        self.learner = self.make(TASKS[task].model(seed=seed), lr, chosen.algorithm, among)
        self.total = TASKS[task].batch * among.size

    def make(self, model: Any, lr: float, algorithm: Algorithm[Any], comm: Communicator) -> Learner:
        """Make the learner of a model. Collective."""
        assert isinstance(model, MLP)
        self.model: Any = model
        return Learner(model.parameters, MomentumSGD(lr=lr, momentum=MOMENTUM), algorithm, comm)

    def gradient(self, x: Array, y: Array) -> float:
        """Calculate the gradient; return the minibatch's mean loss."""
        out, ready = self.learner.gradient, self.learner.ready
        return float(self.model.gradient(x, y, out=out, ready=ready) / len(x))

    def step(self, x: Array, y: Array) -> float:
        self.learner.announce(len(x), self.total)  # as sources do
        loss = self.gradient(x, y)
        try:
            self.learner.step(samples=len(x))
        except UserError:  # the gradient is not finite, and nothing has changed
            return math.nan
        return loss

    def values(self) -> Array:
        values: Array = self.model.parameters.flat
        return values

    def finish(self) -> None:
        self.learner.finish()
