"""Elastic averaging SGD, an algorithm that parallel_sgd does not have, in one file.

    parallel-sgd run -n 4 examples/easgd.py            trains on scikit-learn's digits
    parallel-sgd run -n 4 examples/easgd.py --check    holds it to what every algorithm must be

docs/new_algorithm.md explains it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import parallel_sgd as psgd
from parallel_sgd.algorithms import problem_with
from parallel_sgd.exchange import Exchange
from parallel_sgd.optimizers import LocalStep
from parallel_sgd.state import across, workspace
from parallel_sgd.testing import check_algorithm
from parallel_sgd.validation import integer, number, settle


@dataclass(kw_only=True)
class EASGDState:
    """
    Attributes:
        center: [n], the model that the ranks' own models are tied to.
        steps: minibatches since they last moved towards each other.
        exchange: with its buffer.
    """

    center: Any = across("same")
    steps: int = across("same", default=0)
    exchange: Exchange = workspace()


@dataclass(frozen=True, kw_only=True)
class EASGD(psgd.Algorithm[EASGDState]):
    """Every rank trains a model x_k of its own, tied to a common center c. In every period-th step

        x_k = x_k - alpha * (x_k - c)
        c   = c + beta * mean over the ranks of (x_k - c)

    at once, both with the old values, before the local step. The trained model is the center.

    Args:
        alpha: how far a rank's model moves to the center, from 0 to 1; beta / K on K ranks if not
            given, and then both moves are alike: c moves by alpha * sum of (x_k - c).
        beta: how far the center moves to the mean of the models, from 0 to 1.
        period: minibatches between two such moves.

    Every `period` minibatches a rank sends what an exchange of 32 bits does, and nothing between.

    Source: Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015,
    equations 3 and 4. As there, the ranks count alike, whatever their numbers of samples.
    """

    alpha: float | None = None
    beta: float = 0.9
    period: int = 10

    def __post_init__(self) -> None:
        alpha = None if self.alpha is None else number("alpha", self.alpha, 0, most=1)
        beta = number("beta", self.beta, 0, most=1)
        settle(self, alpha=alpha, beta=beta, period=integer("period", self.period, 1))

    def init(self, parameters: psgd.Parameters, comm: psgd.Communicator) -> EASGDState:
        center = parameters.like().flat
        center[...] = parameters.flat
        return EASGDState(center=center, exchange=Exchange(parameters, comm))

    def step(
        self,
        state: EASGDState,
        parameters: psgd.Parameters,
        gradient: psgd.Parameters,
        samples: int,
        local_step: LocalStep,
        comm: psgd.Communicator,
        total: int | None = None,
    ) -> int:
        if total is None:
            total = comm.agree(None, samples)
        if total == 0:
            return 0
        if state.steps == self.period:
            self._move(state, parameters, comm)
        local_step(gradient.flat, samples, total)
        state.steps += 1
        return total

    def finish(
        self,
        state: EASGDState,
        parameters: psgd.Parameters,
        local_step: LocalStep,
        comm: psgd.Communicator,
    ) -> None:
        self.meet(state, comm)
        if state.steps:
            self._move(state, parameters, comm)
        parameters.flat[...] = state.center

    def shared_model(self, state: EASGDState, parameters: psgd.Parameters) -> Any:
        return state.center

    def bytes_sent(self, state: EASGDState) -> int:
        return state.exchange.bytes_sent

    def _move(
        self, state: EASGDState, parameters: psgd.Parameters, comm: psgd.Communicator
    ) -> None:
        """The two equations; an error on all ranks, where a rank's model is not finite."""
        x, ranks = parameters.flat, comm.size
        comm.agree(problem_with(x, name="model"))
        apart = x - state.center
        x -= (self.beta / ranks if self.alpha is None else self.alpha) * apart
        state.exchange.sum(apart)
        state.center += self.beta / ranks * apart
        state.steps = 0


EXCEPTIONS = {
    "serial": "on one rank the center follows the model at a distance",
    "weights": "the center is drawn to all models alike, whatever their samples",
}
"""What elastic averaging does not promise."""


def conforms(comm: psgd.Communicator | None = None) -> dict[str, str]:
    """Hold EASGD to what every algorithm must be, on threads or on these ranks. Collective."""
    algorithm = EASGD(period=2)
    return check_algorithm(
        algorithm,
        exceptions=EXCEPTIONS,
        one_rank=lambda ranks: replace(algorithm, alpha=algorithm.beta / ranks),
        comm=comm,
    )


def train(comm: psgd.Communicator, algorithm: EASGD, epochs: int = 30) -> float:
    """Train on the digits; the share of the test digits that the center gets right. Collective."""
    training, test = psgd.data.digits()
    model = psgd.models.MLP([64, 128, 10], seed=0)
    learner = psgd.Learner(model.parameters, psgd.SGD(lr=0.3), algorithm, comm)
    source = psgd.data.Source(training, minibatch_size=64, epochs=epochs)
    for x, y in source.minibatches(learner):
        model.gradient(x, y, out=learner.gradient)
        learner.step(samples=len(x))
    learner.finish()
    x, y = test.arrays()
    _, accuracy = model.evaluate(x, y)
    return accuracy


def main() -> None:
    comm = psgd.Communicator.world()
    if "--check" in sys.argv[1:]:
        outcomes = conforms(comm)
        text = "\n".join(f"{name:14} {outcome}" for name, outcome in outcomes.items())
    else:
        algorithm = EASGD()
        text = f"{algorithm} on {comm.size} ranks: accuracy {100 * train(comm, algorithm):.2f} %"
    if comm.rank == 0:
        print(text)


if __name__ == "__main__":
    main()
