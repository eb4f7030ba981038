"""Elastic averaging SGD, an algorithm that parallel_sgd does not have, in one file.

    parallel-sgd run -n 4 examples/easgd.py            trains on scikit-learn's digits
    parallel-sgd run -n 4 examples/easgd.py --check    holds it to what every algorithm must be

docs/new_algorithm.md explains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from on_digits import main

import parallel_sgd as psgd
from parallel_sgd.algorithms import Minibatch, Work
from parallel_sgd.compression import problem_with
from parallel_sgd.exchange import Exchange
from parallel_sgd.options import Real, Whole, option, options
from parallel_sgd.state import across, workspace


@dataclass(kw_only=True)
class EASGDState:
    """
    Attributes:
        center: [n], the model that the ranks' own models are tied to.
        steps: minibatches since they last moved towards each other.
        exchange: with its buffer.
    """

    center: Any = across("same")
    steps: int = across("same", least=0, default=0)
    exchange: Exchange = workspace()


@options
class EASGD(psgd.Algorithm[EASGDState]):
    """Every rank trains a model x_k of its own, tied to a common center c. In every period-th step

        x_k = x_k - alpha * (x_k - c)
        c   = c + beta * mean over the ranks of (x_k - c)

    at once, both with the old values, before the local step. The trained model is the center.
    Every `period` minibatches a rank sends what an exchange of 32 bits does, and nothing between.

    Source: Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015,
    equations 3 and 4. As there, the ranks count alike, whatever their numbers of samples.
    """

    synchronizes_every_step = False

    alpha: float | None = option(
        None,
        Real(most=1),
        "how far a rank's model moves to the center; beta / K if not given",
    )
    beta: float = option(
        0.9,
        Real(most=1),
        "how far the center moves to the mean of the models",
    )
    period: int = option(10, Whole(1), "minibatches between two such moves")

    def init(self, work: Work) -> EASGDState:
        center = work.parameters.like().flat
        center[...] = work.parameters.flat
        exchange = Exchange(work.parameters, work.comm)
        return EASGDState(center=center, exchange=exchange)

    def step(self, state: EASGDState, work: Work, minibatch: Minibatch) -> None:
        if state.steps == self.period:
            self._move(state, work)
        work.optimizer(work.gradient.flat, minibatch.samples, minibatch.total)
        state.steps += 1

    def finish(self, state: EASGDState, work: Work) -> None:
        if state.steps:
            self._move(state, work)
        work.parameters.flat[...] = state.center

    def shared_model(self, state: EASGDState, work: Work) -> Any:
        return state.center

    def _move(self, state: EASGDState, work: Work) -> None:
        """The two equations; an error on all ranks, where a rank's model is not finite."""
        x, ranks = work.parameters.flat, work.comm.size
        work.comm.agree(problem_with(x, name="model"))
        apart = x - state.center
        x -= (self.beta / ranks if self.alpha is None else self.alpha) * apart
        state.exchange.sum(apart)
        state.center += self.beta / ranks * apart
        state.steps = 0


PROMISES = {
    "algorithm": EASGD(period=2),
    "exceptions": {
        "serial": "on one rank the center follows the model at a distance",
        "weights": "the center is drawn to all models, whatever their samples",
        "dry_ranks_count_nothing": "the center is drawn to dry ranks, too",
    },
    "one_rank": lambda ranks: EASGD(period=2, alpha=0.9 / ranks),
}
"""For `check_algorithm`: what elastic averaging does not promise, and what it is on one rank."""


if __name__ == "__main__":
    main(EASGD(), psgd.SGD(lr=0.3), **PROMISES)
