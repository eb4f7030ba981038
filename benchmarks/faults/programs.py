"""The programs of a job's ranks: a training, short or without end, and learners without end.

    parallel-sgd run -n 4 -m benchmarks.faults.programs NAME SETTINGS

SETTINGS are those of the job, as JSON. Programs without end run until a file `STOP` is in the
folder.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import parallel_sgd as psgd
from parallel_sgd.communication import launched_rank

from .diary import Diary, Place
from .families import FAMILIES
from .job import STACKS, Settings

MINIBATCH, HIDDEN = 64, 64
EPOCHS = 15  #: of 1437 digits
COMPUTE_S = 0.003  #: of a local step, at least
CHECKPOINTS = "checkpoints"  #: in the folder of a run
STOP = "stop"
EVALUATE_EVERY = 20  #: steps, in a training without end
STEPS = 20  #: of a learner that is made and closed


@dataclass(frozen=True)
class End:
    """The end of a rank's program: a checksum of its parameters, and the test loss in nats."""

    model: str
    loss: float


class Training:
    """A rank's training, from the newest checkpoint on if there is a checkpoint.

    At the end each rank writes ``end-RANK-PID.json``: see `End`.
    """

    def __init__(self, settings: Settings, diary: Diary, comm: psgd.Communicator) -> None:
        self.settings, self.diary, self.comm = settings, diary, comm
        self.every, self.folder = settings.save_every, Path(settings.folder)
        family = FAMILIES[settings.family]
        self.data, self.test = psgd.data.digits()
        self.model = psgd.models.MLP([64, HIDDEN, 10], seed=0)
        self.learner = psgd.Learner(
            self.model.parameters, psgd.SGD(lr=family.lr), family.algorithm(), comm
        )
        (self.in_session if family.session else self.in_loop)()
        loss, _ = self.model.evaluate(*self.test.arrays())
        digest = hashlib.sha256(self.model.parameters.flat.tobytes()).hexdigest()[:16]
        aside = self.folder / f"end-{diary.rank}-{diary.pid}.part"
        aside.write_text(json.dumps(asdict(End(digest, loss))))
        aside.rename(aside.with_suffix(".json"))
        diary.enter(Place.END)

    def in_loop(self) -> None:
        """Train in a loop of the program's own. Collective."""
        model, learner, diary, every = self.model, self.learner, self.diary, self.every
        epochs = 1_000_000 if self.settings.endless else EPOCHS
        source = psgd.data.Source(self.data, minibatch_size=MINIBATCH, epochs=epochs)
        checkpoints = psgd.Checkpoints(self.folder / CHECKPOINTS, keep=3)
        if every:
            psgd.resume(learner, checkpoints.folder)
        saved = learner.samples // max(every, 1)
        diary.enter(Place.LOCAL_STEP)
        for number, (x, y) in enumerate(source.minibatches(learner), 1):
            self.begin_step(number)
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
            if self.settings.endless and number % EVALUATE_EVERY == 0:
                with learner.evaluation():
                    model.evaluate(*self.test.arrays())
                if stopped(self.folder, self.comm):
                    break
        diary.enter(Place.FINISH)
        learner.finish()
        checkpoints.close()

    def in_session(self) -> None:
        """Train in a session, with evaluations and checkpoints. Collective."""
        diary, every, steps, begin_step = (
            self.diary,
            self.every,
            itertools.count(1),
            self.begin_step,
        )

        class Watched(psgd.training.ModelObjective):
            def backward(self, learner: psgd.Learner, pieces: Any) -> Any:
                diary.enter(Place.LOCAL_STEP)
                begin_step(next(steps))
                loss = super().backward(learner, pieces)
                time.sleep(COMPUTE_S)
                diary.enter(Place.EXCHANGE)
                return loss

        def stepped(row: psgd.Progress) -> None:
            diary.stepped(self.learner.samples, self.learner.last_samples)
            if every and row.samples % every < MINIBATCH:  # about now
                diary.enter(Place.CHECKPOINT)

        checkpoints = self.folder / CHECKPOINTS
        psgd.TrainingSession(
            learner=self.learner,
            objective=Watched(self.model),
            train=self.data,
            minibatch_size=MINIBATCH,
            epochs=EPOCHS,
            progress_every=MINIBATCH,
            validation=psgd.CrossValidation(data=self.test, every=10 * MINIBATCH),
            checkpoints=psgd.CheckpointConfig(folder=checkpoints, every=every, resume=True)
            if every
            else None,
            callbacks=[stepped],
        ).run()
        diary.enter(Place.FINISH)

    def begin_step(self, number: int) -> None:
        """Set Python's clock of the day back by a day, if that is due in this step."""
        if number == self.settings.clock_back:
            now, now_ns = time.time, time.time_ns
            time.time = lambda: now() - 86_400  # type: ignore[method-assign, assignment, unused-ignore]
            time.time_ns = lambda: now_ns() - 86_400 * 10**9  # type: ignore[method-assign, assignment, unused-ignore]


def make_and_close(settings: Settings, diary: Diary, comm: psgd.Communicator) -> None:
    """Make learners of all families in turn, each for a few steps, until stopped."""
    folder = Path(settings.folder)
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
    settings = Settings(**json.loads(sys.argv[2]))
    diary = Diary.begun(Path(settings.folder), launched_rank() or 0)
    comm = psgd.Communicator.world(timeout_s=settings.timeout_s)
    {"train": Training, "learners": make_and_close}[sys.argv[1]](settings, diary, comm)
