"""Are K ranks with 1-bit gradients as good as serial SGD? Paired seeds on digits, real ranks.

Every seed draws its own split, initial model and order, which both runs of the pair share. The
claim is tested for equivalence: the mean difference in test loss lies within the margin with 95 %
confidence if the 90 % bootstrap interval does (two one-sided tests).
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from parallel_sgd import SGD, Communicator, DataParallelSGD
from parallel_sgd.data import digits
from parallel_sgd.models import MLP
from parallel_sgd.schedules import Steps
from parallel_sgd.training import Learner, TrainingSession

from .on_ranks import on_ranks
from .report import Report, positive
from .statistics import compare

HIDDEN, EPOCHS, MINIBATCH = 512, 40, 64
LR = {0: 0.3, 40_000: 0.05}
MARGIN = 0.01  #: of equivalence, in nats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--ranks", type=positive, default=4, metavar="K", help="(default: 4)")
    parser.add_argument("--seeds", type=positive, default=12, help="pairs of runs (default: 12)")


def main(options: argparse.Namespace) -> Report:
    outcomes = on_ranks(options.ranks, "equivalence", {"seeds": options.seeds})
    parallel, serial = map(np.array, outcomes)
    report = Report(
        f"{options.ranks} ranks, 1 bit, against serial SGD: digits, {options.seeds} seeds, "
        f"MLP 64-{HIDDEN}-10, {EPOCHS} epochs"
    )
    for seed, (ours, theirs) in enumerate(zip(parallel, serial, strict=True)):
        reference = f"serial SGD, {theirs[0]:.4f} (accuracy {ours[1]:.2%} and {theirs[1]:.2%})"
        report.add(f"seed {seed}, test loss", ours[0], "nats", reference, ours[0] / theirs[0])
    for i, name, unit in ((0, "mean test loss", "nats"), (1, "mean accuracy", "")):
        ours, theirs = parallel[:, i].mean(), serial[:, i].mean()
        report.add(name, ours, unit, f"serial SGD, {theirs:.4f}", ours / theirs)
    difference = compare(parallel[:, 0], serial[:, 0], MARGIN)
    name, said = "mean difference in test loss", f"{difference}: {difference.verdict}"
    report.add(name, difference.mean, "nats", said, difference.reach)
    return report


def measure(comm: Communicator, seeds: int) -> tuple[list[Any], list[Any]]:
    """Train all pairs on all ranks; return (test loss, accuracy) of 1-bit and of serial runs."""
    parallel, serial = [], []
    for seed in range(seeds):
        parallel.append(_train(seed, DataParallelSGD(gradient_bits=1), comm))
        if comm.rank == 0:
            serial.append(_train(seed, DataParallelSGD(), Communicator.single()))
    return parallel, serial


def _train(
    seed: int, algorithm: DataParallelSGD, comm: Communicator
) -> tuple[float | None, float | None]:
    train, test = digits(seed=seed)
    model = MLP([64, HIDDEN, 10], seed=seed)
    with Learner(model.parameters, SGD(lr=Steps(LR)), algorithm, comm) as learner:
        data: dict[str, Any] = {"train": train, "test": test, "minibatch_size": MINIBATCH}
        session = TrainingSession(
            learner=learner, objective=model, epochs=EPOCHS, seed=seed, **data
        )
        metrics = session.run()[-1].metrics
    return metrics["test_loss"], metrics["test_accuracy"]
