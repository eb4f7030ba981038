"""A job under a fault: the scenario, and all that a fault may see of the job and wait for."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from parallel_sgd.command_line.cluster import EmulatedHosts

from .diary import Diary, Place, diaries
from .families import FAMILIES
from .job import Job, signalled
from .programs import CHECKPOINTS, Settings

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
    """A fault, once in a run.

    Attributes:
        strike: strikes, and says in words what happened.
        prepare: called before the job starts.
        wait: for the moment; returns whether the job still runs.
    """

    strike: Callable[[Target], str]
    prepare: Callable[[Target], object] = lambda target: None
    wait: Callable[[Target], bool] = lambda target: target.wait_for_moment()


@dataclass(frozen=True)
class Scenario:
    """
    Attributes:
        what: the fault in words.
        fault: strikes.
        expected: the expected outcome.
        families: in this scenario.
        survive, spares, restarts: of `parallel-sgd run`.
        hosts: whether each rank is on its own emulated host.
        training: whether the fault strikes in training, and never while the job starts.
        saves: whether saving families write checkpoints; always if a server fails.
        most: the most faults in a run, each after a new start.
        kills: number of ranks killed in turn, without a new start.
        timeout_s: of the ranks' communicator.
        root: whether the fault needs root, as hosts do.
    """

    what: str
    fault: Fault
    expected: Expected
    families: tuple[str, ...] = tuple(FAMILIES)
    survive: bool = False
    spares: int = 0
    restarts: bool = False
    hosts: bool = False
    training: bool = True
    saves: bool = True
    most: int = 1
    kills: int = 1
    timeout_s: float = 300.0
    root: bool = False

    @property
    def options(self) -> list[str]:
        """The options of `parallel-sgd run`."""
        spares = ["--spares", str(self.spares)] if self.spares else []
        return ["--survive"] * self.survive + spares + ["--restarts", "5"] * self.restarts


@dataclass(frozen=True)
class Reference:
    """An undisturbed run.

    Attributes:
        model: the checksum of the final one.
        loss: of the final model on the test data, in nats; the mean of several runs if runs differ.
        start_s: from the launch to the end of the first step.
        training_s: from there to the end of the last step.
        steps: of a rank.
    """

    model: str
    loss: float
    start_s: float
    training_s: float
    steps: int


class Target:
    """
    Args:
        scenario, family: of the run.
        folder: of the run.
        ranks: in training and serving, spares apart.
        reference: an undisturbed run on as many ranks.
        random: draws everything random.
        hosts: of the ranks, if the scenario has hosts.

    Attributes:
        settings: of the child program.
        victims: ranks that fail, in this order.
        victim: the next to fail.
        job: the running job, or the last job.
        struck_s: time of the latest fault, on the monotonic clock.
        launcher_killed: whether only the next launcher can remove the job's files.
        repair: what a user does before a new start of the job.
        traces: of the fault; removed after the run.
    """

    job: Job

    def __init__(
        self,
        scenario: Scenario,
        family: str,
        folder: Path,
        ranks: int,
        reference: Reference,
        random: np.random.Generator,
        hosts: EmulatedHosts | None = None,
    ) -> None:
        self.scenario, self.folder, self.ranks = scenario, folder, ranks
        self.reference, self.random, self.hosts = reference, random, hosts
        self.family = FAMILIES[family]
        needed = self.family.victims == "server"  # it comes back from the newest checkpoint
        self.saves = self.family.saves and (scenario.saves or needed)
        possible = self.family.ranks(ranks)
        self.victims: list[int] = random.choice(possible, scenario.kills, replace=False).tolist()
        self.victim = self.victims[0]
        every = SAVE_EVERY if self.saves else 0
        self.settings = Settings(str(folder), family, every, scenario.timeout_s)
        self.limit_s = SECONDS + 3 * (reference.start_s + reference.training_s)
        self.limit_s += scenario.timeout_s * (scenario.timeout_s < 60)
        self.struck_s = 0.0
        self.launcher_killed = False
        self.repair: Callable[[], object] = lambda: None
        self.traces = ExitStack()
        self._books: list[Diary] = []

    def start(self) -> None:
        """Start the job."""
        self._books, self.launcher_killed, self.repair = [], False, lambda: None
        options, servers = self.scenario.options, self.family.servers
        options += ["--servers", str(servers)] if servers else []
        ranks = self.ranks + self.scenario.spares
        settings = asdict(self.settings)
        self.job = Job("train", settings, self.folder, ranks, options, self.hosts)

    def serves(self, rank: int) -> bool:
        return rank >= self.ranks - self.family.servers

    def books(self, rank: int) -> list[Diary]:
        """Return the diaries of a rank, the newest last."""
        return [book for book in diaries(self.folder) if book.rank == rank]

    def signal_victim(self, number: signal.Signals) -> tuple[int, str]:
        """Send the victim a signal; return the victim's process, and what happened in words."""
        book = self.books(self.victim)[-1]
        signalled(book.pid, number)
        return book.pid, f"{number.name} to rank {self.victim} in {book.place.name}"

    def newest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint by its name, the number of samples."""
        paths = (self.folder / CHECKPOINTS).glob("*")
        found = [path for path in paths if path.name.isdecimal()]
        return max(found, key=lambda path: int(path.name), default=None)

    def wait_until(self, condition: Callable[[], object]) -> bool:
        """Wait for a condition; return whether the job still runs then."""
        deadline = time.monotonic() + self.limit_s
        while not condition():
            if self.job.ended or time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)
        return not self.job.ended

    def wait_until_s(self, moment_s: float) -> bool:
        """Wait for a moment on the monotonic clock; return whether the job still runs."""
        return self.wait_until(lambda: time.monotonic() >= moment_s)

    def wait_for_moment(self) -> bool:
        """Wait for a random moment of the run, or of its training; return whether the job runs.

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

    def wait_for_step(self) -> bool:
        """Wait for a random step of the training; return whether the job still runs."""
        steps = self.random.integers(1, self.reference.steps + 1)
        return self.wait_until(lambda: self._steps() >= steps)

    def wait_for_place(self, place: Place) -> bool:
        """Wait until the victim is in a place; return whether the job still runs."""
        return self.wait_until(
            lambda: (self.victim, place) in {(b.rank, b.place) for b in self._books_of_job()}
        )

    def wait_for_next(self) -> bool:
        """Wait for a moment after a rank's failure, often during recovery; return whether the job
        still runs."""
        if self.random.random() < AT_ONCE:
            return self.wait_until_s(self.struck_s + self.random.uniform(0, AT_ONCE_S))
        now = self._steps()
        steps = now + self.random.integers(1 + max(0, self.reference.steps - now))
        return self.wait_until(lambda: self._steps() >= steps)

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
