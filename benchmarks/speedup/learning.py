"""The accuracy of a model trained by K workers, as threads of a process.

Accuracy does not depend on speed, except for asynchronous workers: the threads' pace decides their
staleness. Every run has the same number of samples, in minibatches of 256 of each worker; the
learning rate rises for a sixteenth of the samples and then falls linearly to a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from parallel_sgd import Communicator, Learner, UserError, simulate
from parallel_sgd.data import Source
from parallel_sgd.schedules import Linear

from ..convergence.optimizers import OPTIMIZERS
from ..study import Line, Runs, Search
from .contenders import BATCH, CLASSES, CONTENDERS, SERIAL, data, model

TUNING_SEED = 1000  #: rates are chosen on it; those that are reported count from 0
LAST_RATE, WARM_UP = 0.1, 1 / 16


@dataclass(frozen=True)
class Learned:
    """
    Attributes:
        contender, workers: of the runs.
        samples: of all workers in a run.
        lr: the highest learning rate, the best of factors of 2.
        tuned: whether the rate was searched for, or is the start of a search.
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


@dataclass(frozen=True)
class Run:
    """A training: the contender, its workers, the samples of all workers, rate and seed."""

    contender: str
    workers: int
    samples: int
    lr: float
    seed: int


Score = tuple[float, float]  #: test loss in nats and accuracy in %


def learn_all(
    cases: Iterable[tuple[str, int]], samples: int, seeds: int, *, tuned: bool, jobs: int
) -> list[Learned]:
    """Train each contender with each number of workers, several runs at a time.

    Raises:
        UserError: a run failed; its error has been printed.
    """
    with Runs(train, jobs=jobs) as runs:
        lines = [learn(*case, samples, seeds, tuned=tuned) for case in cases]
        learned = [one for one in runs.follow(lines) if one]
    if len(learned) < len(lines):
        raise UserError(f"{len(lines) - len(learned)} contenders could not be trained; see above")
    return learned


def cases(names: Sequence[str], workers: Sequence[int]) -> list[tuple[str, int]]:
    """Return contenders and workers, most workers first; a single worker is serial SGD."""
    most_first = sorted(set(workers) - {1}, reverse=True)
    return [*((name, k) for k in most_first for name in names), (SERIAL, 1)]


def learn(
    name: str, workers: int, samples: int, seeds: int, *, tuned: bool
) -> Line[Run, Score, Learned]:
    """Choose a learning rate on a seed of its own, then train once with each seed."""
    rule = OPTIMIZERS[CONTENDERS[name].optimizer]
    place = rule.rates.index(rule.start)
    if tuned:
        place = yield from Search(place, len(rule.rates)).line(
            lambda i: [Run(name, workers, samples, rule.rates[i], TUNING_SEED)],
            lambda score: score[0],
        )
    lr = rule.rates[place]
    runs = [Run(name, workers, samples, lr, seed) for seed in range(seeds)]
    scores = yield runs
    losses, accuracies = ([scores[run][i] for run in runs] for i in (0, 1))
    return Learned(name, workers, samples, lr, tuned, losses, accuracies)


def train(run: Run) -> Score:
    """Return the score at the end; a run that diverges scores as a model that knows nothing."""
    name, workers, samples, lr, seed = astuple(run)
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
