"""SignSGD with majority vote: an algorithm that parallel_sgd does not have, and needs no state.

    parallel-sgd run -n 4 examples/majority_vote.py            trains on scikit-learn's digits
    parallel-sgd run -n 4 examples/majority_vote.py --check    holds it to what it promises

docs/new_algorithm.md explains how an algorithm is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from on_digits import main

import parallel_sgd as psgd
from parallel_sgd.algorithms import Minibatch, Work
from parallel_sgd.exchange import Exchange
from parallel_sgd.options import options
from parallel_sgd.state import workspace


@dataclass(kw_only=True)
class Ballots:
    """
    Attributes:
        exchange: of ballots, with its buffer.
    """

    exchange: Exchange = workspace()


@options
class MajorityVote(psgd.Algorithm[Ballots]):
    """x = x - lr * sign(sum over the ranks of sign(g_k))

    A rank without samples has no vote, and where votes are even a value stays as it is.

    Source: Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: Compressed Optimisation for
    Non-Convex Problems", ICML 2018, algorithm 3. (Here ballots travel as float32.)
    """

    def init(self, work: Work) -> Ballots:
        return Ballots(exchange=Exchange(work.parameters, work.comm))

    def step(self, state: Ballots, work: Work, minibatch: Minibatch) -> None:
        votes = work.gradient.flat
        np.sign(votes, out=votes)
        state.exchange.sum(votes)
        np.sign(votes, out=votes)
        work.optimizer(votes, 1, minibatch.total)


PROMISES = {
    "exceptions": {
        "serial": "one rank takes the sign of its gradient",
        "weights": "a rank has one vote, however many samples",
        "communication": "a vote that changes no majority changes nothing",
        "owed": "what is not in a sign is lost",
    },
}
"""For `check_algorithm`: what majority vote does not promise."""


if __name__ == "__main__":
    main(MajorityVote(), psgd.SGD(lr=0.003), **PROMISES)
