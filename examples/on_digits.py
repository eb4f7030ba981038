"""What the examples of algorithms share: training on scikit-learn's digits, and the conformance
suite."""

from __future__ import annotations

import sys
from typing import Any

import parallel_sgd as psgd
from parallel_sgd.testing import check_algorithm


def train(
    algorithm: psgd.Algorithm[Any],
    optimizer: psgd.Optimizer,
    comm: psgd.Communicator,
    epochs: int = 30,
) -> float:
    """Train an MLP; the share of the test digits that it gets right. Collective."""
    training, test = psgd.data.digits()
    model = psgd.models.MLP([64, 128, 10], seed=0)
    learner = psgd.Learner(model.parameters, optimizer, algorithm, comm)
    source = psgd.data.Source(training, minibatch_size=64, epochs=epochs)
    for x, y in source.minibatches(learner):
        model.gradient(x, y, out=learner.gradient)
        learner.step(samples=len(x))
    learner.finish()
    _, accuracy = model.evaluate(*test.arrays())
    return accuracy


def main(algorithm: psgd.Algorithm[Any], optimizer: psgd.Optimizer, /, **promises: Any) -> None:
    """Train on all ranks, or with ``--check`` hold the algorithm to what it promises.

    Args:
        promises: for `check_algorithm`: a short-period variant as `algorithm`, and what it excepts.
    """
    comm = psgd.Communicator.world()
    if "--check" in sys.argv[1:]:
        outcomes = check_algorithm(**{"algorithm": algorithm, "comm": comm, **promises})
        text = "\n".join(f"{name:24} {outcome}" for name, outcome in outcomes.items())
    else:
        accuracy = train(algorithm, optimizer, comm)
        text = f"{algorithm} on {comm.size} ranks: accuracy {100 * accuracy:.2f} %"
    if comm.rank == 0:
        print(text)
