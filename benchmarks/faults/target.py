"""A job under a fault: the scenario, and all that a fault may see of the job and wait for."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from parallel_sgd.command_line.cluster import EmulatedHosts

from .diary import Diary, Place, diaries
from .families import FAMILIES
from .job import Job, Settings, signalled
from .programs import CHECKPOINTS

SAVE_EVERY = 1500  #: samples
SECONDS = 30.0  #: that a job may take to end, beside those of a whole undisturbed one three times
LOOK_S = 0.002
AT_ONCE, AT_ONCE_S = 0.3, 0.1  #: share of ranks that are lost so soon after another

Expected = Literal["survives", "ends", "goes on", "resumes"]
"""survives: the other ranks go on without the lost one, to a model as good as any; ends: not 0, in
seconds; goes on: as if nothing had been, bit for bit; resumes: started again, it goes on from its
newest checkpoint, bit for bit."""


@dataclass(frozen=True)
class Fault:
    """A fault, once in a run."""

    strike: Callable[[Target], str]  #: says in words what happened
    prepare: Callable[[Target], object] = lambda target: None  #: called before the job starts
    wait: Callable[[Target], bool] = lambda target: target.wait_for_moment()
    """Waits for the moment; returns whether the job still runs."""


@dataclass(frozen=True)
class Scenario:
    """A fault, and the outcome that is expected."""

    what: str  #: the fault in words
    fault: Fault
    expected: Expected
    families: tuple[str, ...] = tuple(FAMILIES)
    survive: bool = False  #: this and the next two: options of `parallel-sgd run`
    spares: int = 0
    restarts: bool = False
    hosts: bool = False  #: each rank is on its own emulated host
    training: bool = True  #: the fault strikes in training, and never while the job starts
    saves: bool = True  #: saving families write checkpoints; always if a server fails
    most: int = 1  #: faults in a run, each after a new start
    kills: int = 1  #: ranks killed in turn, without a new start
    timeout_s: float = 300.0  #: of the ranks' communicator
    root: bool = False  #: the fault needs root, as hosts do


@dataclass(frozen=True)
class Reference:
    """An undisturbed run. The defaults are for the undisturbed run itself."""

    model: str = ""  #: the checksum of the final model
    loss: float = np.nan  #: of the final model, in nats; the mean of several runs if runs differ
    start_s: float = 1.0  #: from the launch to the end of the first step
    training_s: float = 1.0  #: from there to the end of the last step
    steps: int = 1  #: of a rank


@dataclass
class Target:
    """A run of a family in a scenario: its job, and the ranks that fail."""

    scenario: Scenario
    name: str  #: of the family
    folder: Path
    ranks: int  #: in training and serving, spares apart
    reference: Reference  #: an undisturbed run on as many ranks
    random: np.random.Generator  #: draws everything random
    hosts: EmulatedHosts | None = None  #: of the ranks, if the scenario has hosts
    job: Job = field(init=False)  #: running, or the last
    struck: list[float] = field(default_factory=list)  #: times of faults, on the monotonic clock
    launcher_killed: bool = False  #: only the next launcher can remove the job's files
    repair: Callable[[], object] = lambda: None  #: what a user does before a new start of the job
    traces: ExitStack = field(default_factory=ExitStack)  #: of the fault; removed after the run

    def __post_init__(self) -> None:
        scenario, reference = self.scenario, self.reference
        self.family = FAMILIES[self.name]
        needed = self.family.victims == "server"  # it comes back from the newest checkpoint
        self.saves = self.family.saves and (scenario.saves or needed)
        possible = self.family.ranks(self.ranks)
        drawn = self.random.choice(possible, scenario.kills, replace=False)
        self.victims: list[int] = drawn.tolist()  # in this order
        self.victim = self.victims[0]
        every = SAVE_EVERY if self.saves else 0
        self.settings = Settings(str(self.folder), self.name, every, scenario.timeout_s)
        self.limit_s = SECONDS + 3 * (reference.start_s + reference.training_s)
        self.limit_s += scenario.timeout_s * (scenario.timeout_s < 60)

    def start(self) -> None:
        """Start the job."""
        self._books: list[Diary] = []
        self.launcher_killed, self.repair = False, lambda: None
        scenario, servers = self.scenario, self.family.servers
        options = ["--survive"] * scenario.survive + ["--restarts", "5"] * scenario.restarts
        options += ["--spares", str(scenario.spares)] if scenario.spares else []
        options += ["--servers", str(servers)] if servers else []
        ranks = self.ranks + scenario.spares
        self.job = Job("train", self.settings, ranks, options, self.hosts)

    def serves(self, rank: int) -> bool:
        return rank >= self.ranks - self.family.servers

    def books(self, rank: int) -> list[Diary]:
        """Return the diaries of a rank, the newest last."""
        return [book for book in diaries(self.folder) if book.rank == rank]

    def signal_victim(self, number: signal.Signals) -> str:
        """Send the victim a signal; return what happened in words."""
        book = self.books(self.victim)[-1]
        signalled(book.pid, number)
        return f"{number.name} to rank {self.victim} in {book.place.name}"

    def newest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint by its name, the number of samples."""
        paths = (self.folder / CHECKPOINTS).glob("*")
        found = [path for path in paths if path.name.isdecimal()]
        return max(found, key=lambda path: int(path.name), default=None)

    # All waits return whether the job still runs.

    def wait_until(self, condition: Callable[[], object]) -> bool:
        deadline = time.monotonic() + self.limit_s
        while not condition():
            if self.job.ended or time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)
        return not self.job.ended

    def wait_until_s(self, moment_s: float) -> bool:
        """Wait for a moment on the monotonic clock."""
        return self.wait_until(lambda: time.monotonic() >= moment_s)

    def wait_for_moment(self) -> bool:
        """Wait for a random moment of the run, or of its training.

        Moments of training are counted in steps: the pace of a busy machine is unknown.
        """
        reference, random = self.reference, self.random
        whole_s = reference.start_s + reference.training_s
        if not self.scenario.training and random.uniform(0, whole_s) < reference.start_s:
            moment_s = self.job.began_s + random.uniform(0, reference.start_s)
            return self.wait_until_s(moment_s) and self.wait_until(
                lambda: self.victim in {book.rank for book in self._books_of_job()}
            )
        within_s = random.uniform(0, 2 * reference.training_s / reference.steps)
        return self.wait_for_step() and self.wait_until_s(time.monotonic() + within_s)

    def wait_for_step(self, first: int = 1) -> bool:
        """Wait for a random step of the training."""
        steps = self.random.integers(first, max(first, self.reference.steps) + 1)
        return self.wait_until(lambda: self._steps() >= steps)

    def wait_for_place(self, place: Place) -> bool:
        """Wait until the victim is in a place."""
        return self.wait_until(
            lambda: (self.victim, place) in {(b.rank, b.place) for b in self._books_of_job()}
        )

    def wait_for_next(self) -> bool:
        """Wait for a moment after a rank's failure, often during recovery."""
        if self.random.random() < AT_ONCE:
            return self.wait_until_s(self.struck[-1] + self.random.uniform(0, AT_ONCE_S))
        return self.wait_for_step(self._steps())

    def _steps(self) -> int:
        """Return the slowest rank's steps since the job's start; 0 while a rank is missing."""
        books, lost = self._books_of_job(), self.victims[: self.victims.index(self.victim)]
        if len(books) < self.ranks:
            return 0
        alive = (book for book in books if book.rank not in lost)
        return min(book.steps for book in alive if not self.serves(book.rank))

    def _books_of_job(self) -> list[Diary]:
        """Return the diaries of the running job's ranks, without spares."""
        if len(self._books) < self.ranks:
            living = set(self.job.members())
            books = diaries(self.folder)
            self._books = [b for b in books if b.pid in living and b.rank < self.ranks]
        return self._books
