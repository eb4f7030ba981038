"""The programs of a job's ranks: a short training, and an endless one for a soak.

    parallel-sgd run -n 4 -m benchmarks.faults.programs NAME SETTINGS

SETTINGS are the arguments of the program, as JSON.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import parallel_sgd as psgd
from parallel_sgd.communication import launched_rank

from .diary import Diary, Place
from .families import FAMILIES
from .job import STACKS

MINIBATCH, HIDDEN = 64, 64
EPOCHS = 15  #: of 1437 digits
COMPUTE_S = 0.003  #: of a local step, at least
CHECKPOINTS = "checkpoints"  #: in the folder of a run

STOP = "stop"  #: a file in the folder of a soak, which ends the program
TRAINING, LEARNERS = "one training", "learners made and closed"
SAVE_EVERY, EVALUATE_EVERY = 20_000, 1437  #: samples, in a soak
STEPS = 20  #: of a learner that is made and closed


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        folder: of the run, for checkpoints and all more files.
        family: of `FAMILIES`.
        save_every: samples between two checkpoints; 0: none.
        timeout_s: of the communicator.
        clock_back: number of the step that begins with the clock set back by a day; 0: none.
    """

    folder: str
    family: str
    save_every: int
    timeout_s: float
    clock_back: int = 0


@dataclass(frozen=True)
class End:
    """The end of a rank's program: a checksum of its parameters, and the test loss in nats."""

    model: str
    loss: float


def train(**given: Any) -> None:
    """Train a while, from the newest checkpoint on if there is a checkpoint. Collective.

    At the end each rank writes ``end-RANK-PID.json``: see `End`.

    Args:
        given: the settings.
    """
    settings = Settings(**given)
    folder, family = Path(settings.folder), FAMILIES[settings.family]
    rank = launched_rank() or 0
    diary = Diary.begun(folder, rank)
    comm = psgd.Communicator.world(timeout_s=settings.timeout_s)
    training, test = psgd.data.digits()
    model = psgd.models.MLP([64, HIDDEN, 10], seed=0)
    learner = psgd.Learner(model.parameters, psgd.SGD(lr=family.lr), family.algorithm(), comm)
    in_way = in_session if family.session else in_loop
    in_way(settings, learner, model, training, test, diary)
    loss, _ = model.evaluate(*test.arrays())
    digest = hashlib.sha256(model.parameters.flat.tobytes()).hexdigest()[:16]
    aside = folder / f"end-{rank}-{os.getpid()}.part"
    aside.write_text(json.dumps(asdict(End(digest, loss))))
    aside.rename(aside.with_suffix(".json"))
    diary.enter(Place.END)


def in_loop(
    settings: Settings, learner: Any, model: Any, training: Any, test: Any, diary: Diary
) -> None:
    """Train in a loop of the program's own. Collective."""
    source = psgd.data.Source(training, minibatch_size=MINIBATCH, epochs=EPOCHS)
    checkpoints = psgd.Checkpoints(Path(settings.folder, CHECKPOINTS), keep=3)
    every = settings.save_every
    if every:
        psgd.resume(learner, checkpoints.folder)
    saved = learner.samples // max(every, 1)
    diary.enter(Place.LOCAL_STEP)
    for number, (x, y) in enumerate(source.minibatches(learner), 1):
        if number == settings.clock_back:
            set_clock_back()
        model.gradient(x, y, out=learner.gradient, ready=learner.ready)
        time.sleep(COMPUTE_S)
        diary.enter(Place.EXCHANGE)
        total = learner.step(samples=len(x))
        diary.stepped(learner.samples, total)
        if every and total and learner.samples // every > saved:
            saved = learner.samples // every
            diary.enter(Place.CHECKPOINT)
            checkpoints.save(learner)
        diary.enter(Place.LOCAL_STEP)
    diary.enter(Place.FINISH)
    learner.finish()
    checkpoints.close()


def in_session(
    settings: Settings, learner: Any, model: Any, training: Any, test: Any, diary: Diary
) -> None:
    """Train in a session, with evaluations and checkpoints. Collective."""
    every, steps = settings.save_every, itertools.count(1)

    class Watched(psgd.training.ModelObjective):
        def backward(self, learner: psgd.Learner, pieces: Any) -> Any:
            diary.enter(Place.LOCAL_STEP)
            if next(steps) == settings.clock_back:
                set_clock_back()
            loss = super().backward(learner, pieces)
            time.sleep(COMPUTE_S)
            diary.enter(Place.EXCHANGE)
            return loss

    def stepped(row: psgd.Progress) -> None:
        diary.stepped(learner.samples, learner.last_samples)
        if every and row.samples % every < MINIBATCH:  # about now
            diary.enter(Place.CHECKPOINT)

    config = psgd.CheckpointConfig(
        folder=Path(settings.folder, CHECKPOINTS), every=every or None, resume=True
    )
    psgd.TrainingSession(
        learner=learner,
        objective=Watched(model),
        train=training,
        minibatch_size=MINIBATCH,
        epochs=EPOCHS,
        progress_every=MINIBATCH,
        validation=psgd.CrossValidation(data=test, every=10 * MINIBATCH),
        checkpoints=config if every else None,
        callbacks=[stepped],
    ).run()
    diary.enter(Place.FINISH)


def set_clock_back() -> None:
    """Set Python's clock of the day back by a day."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() - 86_400  # type: ignore[method-assign, assignment, unused-ignore]
    time.time_ns = lambda: now_ns() - 86_400 * 10**9  # type: ignore[method-assign, assignment, unused-ignore]


def soak(folder: str, part: str) -> None:
    """Run a part of a soak, until a file `STOP` is in the folder. Collective."""
    Diary.begun(Path(folder), launched_rank() or 0)
    comm = psgd.Communicator.world(timeout_s=120)
    {TRAINING: train_on, LEARNERS: make_and_close}[part](Path(folder), comm)


def train_on(folder: Path, comm: psgd.Communicator) -> None:
    """Train with checkpoints and evaluations, until stopped."""
    training, test = psgd.data.digits()
    model = psgd.models.MLP([64, HIDDEN, 10], seed=0)
    algorithm = psgd.DataParallelSGD(gradient_bits=1, overlap=True)
    learner = psgd.Learner(model.parameters, psgd.MomentumSGD(lr=0.01), algorithm, comm)
    source = psgd.data.Source(training, minibatch_size=MINIBATCH, epochs=1_000_000)
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
    """Make learners of all families in turn, each for a few steps, until stopped."""
    for made, family in enumerate(itertools.cycle(FAMILIES.values())):
        if stopped(folder, comm):
            return
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
        if made % len(FAMILIES) == 0:
            gc.collect()


def stopped(folder: Path, comm: psgd.Communicator) -> bool:
    """Return whether all ranks must stop, as rank 0 sees the folder. Collective."""
    return bool(comm.allgather_object((folder / STOP).exists())[0])


if __name__ == "__main__":
    faulthandler.register(STACKS, all_threads=True)
    programs: dict[str, Callable[..., None]] = {"train": train, "soak": soak}
    programs[sys.argv[1]](**json.loads(sys.argv[2]))
