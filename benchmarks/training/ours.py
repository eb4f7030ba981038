"""Our side: ranks of MPI, one on each host, that train as a program of the user's would."""

from __future__ import annotations

import math
import sys

from parallel_sgd import Communicator, Learner, MomentumSGD, UserError
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
        model = TASKS[task].model(seed=seed)
        assert isinstance(model, MLP)
        self.model = model
        self.learner = Learner(
            self.model.parameters,
            MomentumSGD(lr=lr, momentum=MOMENTUM),
            chosen.algorithm,
            comm if chosen.period else Communicator.single(),
        )
        self.total = TASKS[task].batch * self.learner.comm.size

    def step(self, x: Array, y: Array) -> float:
        learner = self.learner
        learner.announce(len(x), self.total)  # as sources do
        loss = self.model.gradient(x, y, out=learner.gradient, ready=learner.ready)
        try:
            learner.step(samples=len(x))
        except UserError:  # the gradient is not finite, and nothing has changed
            return math.nan
        return loss / len(x)

    def values(self) -> Array:
        values: Array = self.model.parameters.flat
        return values

    def finish(self) -> None:
        self.learner.finish()


def main(path: str) -> None:
    comm = Communicator.world()

    def make(contender: str, task: str, lr: float, seed: int) -> Ours:
        return Ours(comm, contender, task, lr, seed)

    Member(comm.rank, comm.size, make, comm.barrier).follow(path, "ours")


if __name__ == "__main__":
    with abort_on_error():
        main(sys.argv[1])
