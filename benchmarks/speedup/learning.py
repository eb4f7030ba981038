"""How well a model is learned by so many workers: real training, in threads of one process.

What is learned does not depend on speed, but for the asynchronous workers, whose staleness is what
the threads' pace makes of it. Every run has the same number of samples, in minibatches of 256
of each worker; the learning rate rises for a sixteenth of them and then falls linearly to a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from parallel_sgd import Communicator, Learner, UserError, simulate
from parallel_sgd.data import Source
from parallel_sgd.schedules import Linear

from ..convergence.optimizers import OPTIMIZERS
from ..convergence.runs import process_pool
from .contenders import BATCH, CLASSES, CONTENDERS, SERIAL, data, model

TUNING_SEED = 1000  #: rates are chosen on it; those that are reported count from 0
LAST_RATE, WARM_UP = 0.1, 1 / 16


@dataclass(frozen=True)
class Learned:
    """
    Attributes:
        contender, workers: which.
        samples: of all workers in a run.
        lr: the highest learning rate, the best of factors of 2.
        tuned: whether it was looked for, or is where the search would begin.
        losses: on the test set in nats, of each seed.
        accuracies: in %, likewise.
    """

    contender: str
    workers: int
    samples: int
    lr: float
    tuned: bool
    losses: list[float]
    accuracies: list[float]


def learn_all(
    cases: Iterable[tuple[str, int]], samples: int, seeds: int, *, tuned: bool, jobs: int
) -> list[Learned]:
    """Train contenders with so many workers each, as many at a time as there are jobs."""
    pool = process_pool(jobs)
    try:
        under_way = [
            pool.submit(learn, name, workers, samples, seeds, tuned=tuned)
            for name, workers in cases
        ]
        return [future.result() for future in under_way]
    finally:
        pool.shutdown(cancel_futures=True)


def cases(names: Sequence[str], workers: Sequence[int]) -> list[tuple[str, int]]:
    """The largest first. One worker is serial SGD, and is trained once."""
    most_first = sorted(set(workers) - {1}, reverse=True)
    return [*((name, k) for k in most_first for name in names), (SERIAL, 1)]


def learn(name: str, workers: int, samples: int, seeds: int, *, tuned: bool) -> Learned:
    """Choose a learning rate, and train with it, once for each seed."""
    rule = OPTIMIZERS[CONTENDERS[name].optimizer]

    @cache
    def loss_at(place: int) -> float:
        return train(name, workers, samples, rule.rates[place], TUNING_SEED)[0]

    place = rule.rates.index(rule.start)
    if tuned:
        place = best_place(loss_at, place, len(rule.rates))
    lr = rule.rates[place]
    scores = [train(name, workers, samples, lr, seed) for seed in range(seeds)]
    losses, accuracies = (list(values) for values in zip(*scores, strict=True))
    return Learned(name, workers, samples, lr, tuned, losses, accuracies)


def best_place(loss_at: Callable[[int], float], start: int, count: int) -> int:
    """Where the loss is least, going from `start` down for as long as that does no harm, since
    rates at which training diverges are alike; and up where it does."""
    best = start
    while best > 0 and loss_at(best - 1) <= loss_at(best):
        best -= 1
    if best == start:
        while best + 1 < count and loss_at(best + 1) < loss_at(best):
            best += 1
    return best


def train(name: str, workers: int, samples: int, lr: float, seed: int) -> tuple[float, float]:
    """The test loss in nats and the accuracy in %, at the end. Who diverges knows nothing."""
    contender = CONTENDERS[name]
    training, test = data(samples, seed)
    low = LAST_RATE * lr
    rate = Linear({0: low, round(WARM_UP * samples): lr, samples: low})

    def one_rank(comm: Communicator) -> tuple[float, float] | None:
        net = model(seed)
        optimizer = OPTIMIZERS[contender.optimizer].make(rate)
        learner = Learner(net.parameters, optimizer, contender.algorithm, comm)
        if not learner.serves:
            source = Source(
                training, minibatch_size=BATCH * learner.comm.size, epochs=1, seed=seed, dtype=None
            )
            for x, y in source.minibatches(learner):
                net.gradient(x, y, out=learner.gradient)
                learner.step(samples=len(x))
        learner.finish()
        return net.evaluate(*test.arrays()) if comm.rank == 0 else None

    try:
        scored = simulate(workers + contender.servers, one_rank)[0]
    except UserError:  # it has diverged
        return math.log(CLASSES), 100 / CLASSES
    assert scored is not None  # rank 0 is a worker
    loss, accuracy = scored
    if not loss < math.log(CLASSES):
        return math.log(CLASSES), 100 / CLASSES
    return loss, 100 * accuracy
