"""Our side: ranks of MPI, one on each host, in training as a program of a user would be."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

from parallel_sgd import Algorithm, Communicator, Learner, MomentumSGD, UserError
from parallel_sgd.communication.entry_point import abort_on_error
from parallel_sgd.models import MLP

from .contenders import CONTENDERS, MOMENTUM
from .member import Member
from .tasks import TASKS, Array


class Ours:
    """A model, a learner and the loop around them."""

    def __init__(self, comm: Communicator, contender: str, task: str, lr: float, seed: int) -> None:
        chosen = CONTENDERS[contender]
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


def main(path: str) -> None:
    comm = Communicator.world()
    Member(comm.rank, comm.size, partial(Ours, comm), comm.barrier).follow(path, "ours")


if __name__ == "__main__":
    with abort_on_error():
        main(sys.argv[1])
