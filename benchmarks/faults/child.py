"""The program of every rank under faults: a short training, written down in a diary.

    parallel-sgd run -n 4 -m benchmarks.faults child SETTINGS

The settings are JSON: see `Settings`. A program resumes from a checkpoint if there is one. At the
end each rank writes ``end-RANK-PID.json``: see `End`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import parallel_sgd as psgd
from parallel_sgd.communication import launched_rank

from .diary import Diary, Place
from .families import FAMILIES

MINIBATCH, HIDDEN = 64, 64
EPOCHS = 15  #: of 1437 digits
COMPUTE_S = 0.003  #: of a local step, at least
CHECKPOINTS, DIED = "checkpoints", "died"  #: in the folder of a run


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        folder: of the run, for checkpoints and all more files.
        family: of `FAMILIES`.
        save_every: samples between two checkpoints; 0: none.
        timeout_s: of the communicator.
        die: how a rank kills itself: ``rank``, ``place`` (of `Place`, by name), ``call`` (1 for
            the first time in that place) and ``after_s`` (seconds later).
        clock_back: number of the step that begins with the clock set back by a day; 0: none.
    """

    folder: str
    family: str
    save_every: int = 0
    timeout_s: float = 60.0
    die: dict[str, Any] = field(default_factory=dict)
    clock_back: int = 0


@dataclass(frozen=True)
class End:
    """The end of a rank's program: a checksum of its parameters, and the test loss in nats."""

    model: str
    loss: float


class Fate:
    """Writes down this rank's place, and kills the rank if the settings say so."""

    def __init__(self, diary: Diary, die: dict[str, Any]) -> None:
        self.diary = diary
        self._die = die if die.get("rank") == diary.rank else {}
        self._calls = 0
        self.enter(Place.START)

    def enter(self, place: Place) -> None:
        self.diary.enter(place)
        if self._die and place == Place[self._die["place"]]:
            self._calls += 1
            if self._calls == self._die["call"]:
                self._end(self._die["after_s"])

    def _end(self, after_s: float) -> None:
        spent = self.diary.path.with_name(DIED)  # a program that is started again lives on
        if spent.exists():
            return
        spent.write_text(str(time.monotonic() + after_s))
        if after_s:
            timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def main(**given: Any) -> None:
    """Train, from the newest checkpoint on if there is a checkpoint. Collective.

    Args:
        given: the settings.
    """
    settings = Settings(**given)
    folder, family = Path(settings.folder), FAMILIES[settings.family]
    rank = launched_rank() or 0
    fate = Fate(Diary.begun(folder, rank), settings.die)
    comm = psgd.Communicator.world(timeout_s=settings.timeout_s)
    training, test = psgd.data.digits()
    model = psgd.models.MLP([64, HIDDEN, 10], seed=0)
    learner = psgd.Learner(model.parameters, psgd.SGD(lr=family.lr), family.algorithm(), comm)
    train = in_session if family.session else in_loop
    train(settings, learner, model, training, test, fate)
    loss, _ = model.evaluate(*test.arrays())
    digest = hashlib.sha256(model.parameters.flat.tobytes()).hexdigest()[:16]
    aside = folder / f"end-{rank}-{os.getpid()}.part"
    aside.write_text(json.dumps(asdict(End(digest, loss))))
    aside.rename(aside.with_suffix(".json"))
    fate.enter(Place.END)


def in_loop(
    settings: Settings, learner: Any, model: Any, training: Any, test: Any, fate: Fate
) -> None:
    """Train in a loop of the program's own. Collective."""
    source = psgd.data.Source(training, minibatch_size=MINIBATCH, epochs=EPOCHS)
    checkpoints = psgd.Checkpoints(Path(settings.folder, CHECKPOINTS), keep=3)
    every = settings.save_every
    if every:
        psgd.resume(learner, checkpoints.folder)
    saved = learner.samples // max(every, 1)
    fate.enter(Place.LOCAL_STEP)
    for number, (x, y) in enumerate(source.minibatches(learner), 1):
        if number == settings.clock_back:
            set_clock_back()
        model.gradient(x, y, out=learner.gradient, ready=learner.ready)
        time.sleep(COMPUTE_S)
        fate.enter(Place.EXCHANGE)
        total = learner.step(samples=len(x))
        fate.diary.stepped(learner.samples, total)
        if every and total and learner.samples // every > saved:
            saved = learner.samples // every
            fate.enter(Place.CHECKPOINT)
            checkpoints.save(learner)
        fate.enter(Place.LOCAL_STEP)
    fate.enter(Place.FINISH)
    learner.finish()
    checkpoints.close()


def in_session(
    settings: Settings, learner: Any, model: Any, training: Any, test: Any, fate: Fate
) -> None:
    """Train in a session, with evaluations and checkpoints. Collective."""
    every, steps = settings.save_every, itertools.count(1)

    class Watched(psgd.training.ModelObjective):
        def backward(self, learner: psgd.Learner, pieces: Any) -> Any:
            fate.enter(Place.LOCAL_STEP)
            if next(steps) == settings.clock_back:
                set_clock_back()
            loss = super().backward(learner, pieces)
            time.sleep(COMPUTE_S)
            fate.enter(Place.EXCHANGE)
            return loss

    def stepped(row: psgd.Progress) -> None:
        fate.diary.stepped(learner.samples, learner.last_samples)
        if every and row.samples % every < MINIBATCH:  # about now
            fate.enter(Place.CHECKPOINT)

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
    fate.enter(Place.FINISH)


def set_clock_back() -> None:
    """Set Python's clock of the day back by a day."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() - 86_400  # type: ignore[method-assign, assignment, unused-ignore]
    time.time_ns = lambda: now_ns() - 86_400 * 10**9  # type: ignore[method-assign, assignment, unused-ignore]


def ends(folder: Path) -> dict[int, End]:
    """Return the ends of all finished ranks, by rank."""
    paths = folder.glob("end-*.json")
    return {int(path.stem.split("-")[1]): End(**json.loads(path.read_text())) for path in paths}
