"""The accuracy of a model trained by K workers, as threads of a process.

Accuracy does not depend on speed, except for asynchronous workers: the threads' pace decides their
staleness. Every run has the same number of samples, in minibatches of 256 of each worker; the
learning rate rises for a sixteenth of the samples and then falls linearly to a tenth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parallel_sgd import UserError

from ..convergence.optimizers import OPTIMIZERS
from ..convergence.task import Score
from ..convergence.training import FIRST_TUNING_SEED, scores_of
from ..study import Runs
from .contenders import CONTENDERS, SERIAL, TASK


@dataclass(frozen=True)
class Learned:
    """
    Attributes:
        contender, workers: of the runs.
        samples: of all workers in a run.
        lr: the highest learning rate, the best of factors of 2.
        losses: on the test set in nats, of each seed.
        accuracies: in %, likewise.
    """

    contender: str
    workers: int
    samples: int
    lr: float
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


def train(run: Run) -> Score:
    """Return the score at the end."""
    contender = CONTENDERS[run.contender]
    (score,), _ = scores_of(
        *(TASK, contender.algorithm, contender.optimizer, run.workers),
        lr=run.lr,
        seed=run.seed,
        samples=run.samples,
        servers=contender.servers,
    )
    return score


def learn_all(
    names: Iterable[str], workers: Iterable[int], samples: int, seeds: int, jobs: int
) -> list[Learned]:
    """Tune each contender's rate on a seed of its own, with each number of workers, and train with
    each seed. The longest runs come first; a single worker is serial SGD.

    Raises:
        UserError: a run failed; its error has been printed.
    """
    most_first = sorted({*workers} - {1}, reverse=True)
    cases = [*((name, k) for k in most_first for name in names), (SERIAL, 1)]
    with Runs(train, jobs=jobs) as runs:
        learned = runs.map(lambda case: _learn(runs, *case, samples, range(seeds)), cases)
    if missing := learned.count(None):
        raise UserError(f"{missing} contenders could not be trained; see above")
    return [one for one in learned if one]


def _learn(
    runs: Runs[Run, Score], name: str, workers: int, samples: int, seeds: Sequence[int]
) -> Learned:
    rule = OPTIMIZERS[CONTENDERS[name].optimizer]

    def runs_of(i: int, seeds: Sequence[int] = (FIRST_TUNING_SEED,)) -> list[Run]:
        return [Run(name, workers, samples, rule.rates[i], seed) for seed in seeds]

    start, count = rule.rates.index(rule.start), len(rule.rates)
    best = runs.search(start, count, runs_of, lambda score: score[0]).best
    scores = runs.outcomes_of(runs_of(best, seeds))
    losses, errors = zip(*scores, strict=True)
    return Learned(
        name, workers, samples, rule.rates[best], [*losses], [100 - error for error in errors]
    )
