"""The program of a soak: an endless training, or learners made and closed in a loop.

    parallel-sgd run -n 4 -m benchmarks.faults endless '{"folder": …, "part": "one training"}'

Ends as soon as a file `STOP` is in the folder.
"""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np

import parallel_sgd as psgd
from parallel_sgd.communication import launched_rank

from .child import CHECKPOINTS, HIDDEN, MINIBATCH
from .diary import Diary
from .families import FAMILIES, Family

STOP = "stop"
TRAINING, LEARNERS = "one training", "learners made and closed"
SAVE_EVERY = 20_000  #: samples
EVALUATE_EVERY = 1437  #: samples: about an epoch
STEPS = 20  #: of a learner that is made and closed
EPOCHS = 1_000_000


def main(folder: str, part: str) -> None:
    """Run a part of the soak. Collective."""
    Diary.begun(Path(folder), launched_rank() or 0)
    comm = psgd.Communicator.world(timeout_s=120)
    {TRAINING: train, LEARNERS: make_and_close}[part](Path(folder), comm)


def train(folder: Path, comm: psgd.Communicator) -> None:
    """Train with checkpoints and evaluations, until stopped."""
    training, test = psgd.data.digits()
    model = psgd.models.MLP([64, HIDDEN, 10], seed=0)
    algorithm = psgd.DataParallelSGD(gradient_bits=1, overlap=True)
    learner = psgd.Learner(model.parameters, psgd.MomentumSGD(lr=0.01), algorithm, comm)
    source = psgd.data.Source(training, minibatch_size=MINIBATCH, epochs=EPOCHS)
    part = psgd.data.Arrays(*(a[comm.rank :: comm.size] for a in test.arrays()))
    with psgd.Checkpoints(folder / CHECKPOINTS, keep=2) as checkpoints:
        for x, y in source.minibatches(learner):
            model.gradient(x, y, out=learner.gradient, ready=learner.ready)
            before = learner.samples
            learner.step(samples=len(x))
            if learner.samples // EVALUATE_EVERY > before // EVALUATE_EVERY:
                with learner.evaluation():
                    loss, _ = model.evaluate(*part.arrays())
                if not np.isfinite(loss):
                    learner.fail("the loss is not finite")
                if stopped(folder, comm):
                    break
            if learner.samples // SAVE_EVERY > before // SAVE_EVERY:
                checkpoints.save(learner)
    learner.finish()
    learner.close()


def make_and_close(folder: Path, comm: psgd.Communicator) -> None:
    """Make learners of all algorithms in turn, each for a few steps, until stopped."""
    made = 0
    families: list[Family] = list(FAMILIES.values())
    while not stopped(folder, comm):
        family = families[made % len(families)]
        model = psgd.models.MLP([64, HIDDEN, 10], seed=made)
        with (
            psgd.Learner(model.parameters, psgd.SGD(lr=0.01), family.algorithm(), comm) as learner,
            psgd.Checkpoints(folder / CHECKPOINTS, keep=1) as checkpoints,
        ):
            for _ in range(0 if learner.serves else STEPS):
                learner.gradient.flat[:] = 1e-3
                learner.step(samples=1)
            if not family.servers:
                checkpoints.save(learner)
            learner.finish()
        made += 1
        if made % len(families) == 0:
            gc.collect()


def stopped(folder: Path, comm: psgd.Communicator) -> bool:
    """Return whether all ranks must stop, as rank 0 sees the folder. Collective."""
    return bool(comm.allgather_object((folder / STOP).exists())[0])
