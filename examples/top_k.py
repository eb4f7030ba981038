"""Top-k sparsification with error feedback, an algorithm that parallel_sgd does not have.

    parallel-sgd run -n 4 examples/top_k.py            trains on scikit-learn's digits
    parallel-sgd run -n 4 examples/top_k.py --check    holds it to what every algorithm must be

docs/new_algorithm.md explains how an algorithm is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from on_digits import main

import parallel_sgd as psgd
from parallel_sgd.algorithms import Minibatch, Work
from parallel_sgd.options import Real, option, options
from parallel_sgd.state import Component, across, workspace


@dataclass(kw_only=True)
class TopKState(Component):
    """
    Attributes:
        residual: [n], what this rank has not sent yet.
        bytes_sent: by this rank to others.
    """

    residual: Any = across("sum")
    bytes_sent: int = workspace(default=0)


@options
class TopK(psgd.Algorithm[TopKState]):
    """Every rank sends the largest values of v_k = g_k + r_k, and keeps the rest:

        g = sum over the ranks of top(v_k);   r_k = v_k - top(v_k);   x = optimizer(x, g)

    Each step is two all-gathers, of values and of their places: 8 bytes a value and rank.

    Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    fraction: float = option(0.01, Real(most=1, positive=True), "of the values that are sent")

    def init(self, work: Work) -> TopKState:
        return TopKState(residual=work.parameters.like().flat)

    def step(self, state: TopKState, work: Work, minibatch: Minibatch) -> None:
        comm, gradient, residual = work.comm, work.gradient.flat, state.residual
        residual += gradient
        kept = max(1, round(self.fraction * residual.size))
        places = np.argpartition(np.abs(residual), -kept)[-kept:].astype(np.int32)
        values = residual[places]
        residual[places] = 0
        every_value = np.empty(comm.size * kept, values.dtype)
        every_place = np.empty(comm.size * kept, places.dtype)
        comm.allgather(values, every_value, [kept] * comm.size)
        comm.allgather(places, every_place, [kept] * comm.size)
        state.bytes_sent += (comm.size - 1) * (values.nbytes + places.nbytes)
        gradient.fill(0)
        np.add.at(gradient, every_place, every_value)  # in the order of the ranks
        work.optimizer(gradient, minibatch.total)


PROMISES = {"algorithm": TopK(fraction=0.1), "full_precision": TopK(fraction=1.0)}
"""For `check_algorithm`: with all values sent nothing is lost."""


if __name__ == "__main__":
    main(TopK(), psgd.SGD(lr=0.1), **PROMISES)
