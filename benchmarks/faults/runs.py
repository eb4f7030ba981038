"""A run of a scenario: a job starts, a fault strikes, and the outcome is kept."""

from __future__ import annotations

import math
import shutil
import signal
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .child import CHECKPOINTS, OUTPUT_AT_MOST, ends
from .diary import Diary, Place, diaries, lost_samples, recovery_s
from .families import FAMILIES, Family
from .faults import newest_checkpoint
from .job import OUTPUT, TEMPORARY, Job, processes_left, signalled
from .leftovers import Belongings
from .outcome import Outcome, Reference, wrong_result
from .scenarios import Scenario

if TYPE_CHECKING:
    from .bench import Bench

RATE = 1e9  #: of emulated links, bits/s
SAVE_EVERY = 1500  #: samples
SECONDS = 30.0  #: that a job may take to end, beside those of a whole undisturbed one three times
TRIES = 8  #: starts of one run, at most
LOOK_S = 0.005
AT_ONCE, AT_ONCE_S = 0.3, 0.1  #: share of ranks that are lost so soon after another


class Run:
    """
    Attributes:
        random: draws everything random.
        victims: ranks that fail, in this order.
        victim: the next to fail.
        job: the running job, or the last job.
        struck_s: time of the latest fault, on the monotonic clock.
        reference: an undisturbed run on as many ranks.
        rate: of the links, bits/s.
        damaged: a checkpoint, by the fault.
        launcher_killed: whether only the next launcher can remove the job's files.
    """

    job: Job
    rate = RATE
    launcher_killed = False

    def __init__(
        self,
        bench: Bench,
        scenario: Scenario,
        name: str,
        reference: Reference | None,
        number: int,
        key: str = "",
    ) -> None:
        self.bench, self.scenario, self.number = bench, scenario, number
        self.key, self.name = key, name
        self.family: Family = FAMILIES[name]
        self.ranks = bench.ranks
        self.reference = reference or Reference("", math.nan, 1.0, 1.0, 1)
        needed = self.family.victims == "server"  # it comes back from the newest checkpoint
        self.saves = self.family.saves and (scenario.saves or needed)
        row = zlib.crc32(f"{key}/{name}".encode())
        self.random = np.random.default_rng([bench.seed, row, number])
        possible = self.family.ranks(self.ranks)
        self.victims = self.random.choice(possible, scenario.kills, replace=False).tolist()
        self.victim: int = self.victims[0]
        self.folder = bench.folder / f"{key or 'calm'}-{name}-{number}"
        self.folder.mkdir()
        self.hosts = bench.hosts() if scenario.hosts else None
        self.settings = replace(
            bench.settings,
            folder=str(self.folder),
            family=name,
            save_every=SAVE_EVERY if self.saves else 0,
            timeout_s=scenario.timeout_s,
        )
        self.struck_s = 0.0
        self._books: list[Diary] = []
        self.damaged: Path | None = None
        self.limit_s = SECONDS + scenario.timeout_s * (scenario.timeout_s < 60)
        self.limit_s += 3 * (self.reference.start_s + self.reference.training_s)

    # What faults ask.

    def serves(self, rank: int) -> bool:
        return rank >= self.ranks - self.family.servers

    def pid(self, rank: int) -> int:
        """Return the process of a rank."""
        return [book.pid for book in diaries(self.folder) if book.rank == rank][-1]

    def pids(self) -> list[int]:
        return [book.pid for book in diaries(self.folder)]

    def place(self, rank: int) -> str:
        return [book.place.name for book in diaries(self.folder) if book.rank == rank][-1]

    @property
    def goes_on_by_itself(self) -> bool:
        """True if the launcher restarts the job."""
        return "--restarts" in self.scenario.options

    def newest_checkpoint(self) -> Path | None:
        return newest_checkpoint(self.folder / CHECKPOINTS)

    def wait_until(self, condition: Callable[[], object]) -> bool:
        """Wait for a condition; return whether the job still runs then."""
        deadline = time.monotonic() + self.limit_s
        while not condition():
            if self.job.ended or time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)
        return not self.job.ended

    def wait_for_moment(self) -> bool:
        """Wait for a random moment of the run, or of its training; return whether the job runs.

        Moments of training are counted in steps: the pace of a busy machine is unknown.
        """
        reference, random = self.reference, self.random
        whole_s = reference.start_s + reference.training_s
        if not self.scenario.training and random.uniform(0, whole_s) < reference.start_s:
            moment_s = self.job.began_s + random.uniform(0, reference.start_s)
            return self.wait_until(lambda: time.monotonic() >= moment_s) and self.wait_until(
                lambda: self.victim in {book.rank for book in self._books_of_job()}
            )
        steps, step_s = random.integers(1, reference.steps + 1), reference.step_s
        if not self.wait_until(lambda: self._steps() >= steps):
            return False
        moment_s = time.monotonic() + random.uniform(0, 2 * step_s)
        return self.wait_until(lambda: time.monotonic() >= moment_s)

    def _steps(self) -> int:
        """Return the slowest rank's steps since the job's start; 0 while a rank is missing."""
        books, lost = self._books_of_job(), self.victims[: self.victims.index(self.victim)]
        if len(books) < self.ranks:
            return 0
        alive = (book for book in books if book.rank not in lost)
        return min(book.steps for book in alive if not self.serves(book.rank))

    def wait_for_next(self) -> bool:
        """Wait for a moment after a rank's failure, often during recovery; return whether the job
        still runs."""
        if self.random.random() < AT_ONCE:
            moment_s = self.struck_s + self.random.uniform(0, AT_ONCE_S)
            return self.wait_until(lambda: time.monotonic() >= moment_s)
        now = self._steps()
        steps = now + self.random.integers(1 + max(0, self.reference.steps - now))
        return self.wait_until(lambda: self._steps() >= steps)

    def _books_of_job(self) -> list[Diary]:
        """Return the diaries of the running job's ranks, without spares."""
        if len(self._books) < self.ranks:
            living = set(self.job.members())
            books = diaries(self.folder)
            self._books = [b for b in books if b.pid in living and b.rank < self.ranks]
        return self._books

    # A run.

    def undisturbed(self) -> Reference:
        """Carry out an undisturbed run.

        Raises:
            RuntimeError: the run fails.
        """
        self._start()
        if not self.job.wait(600) or self.job.process.returncode != 0:
            self.job.kill()
            raise RuntimeError(f"{self.name} fails without any fault: {self._said()}")
        books, found = diaries(self.folder), ends(self.folder)
        entries = [book.entries()["time_s"] for book in books if book.steps]
        first_s, last_s = min(map(min, entries)), max(map(max, entries))
        wrong = wrong_result(found, self.ranks, None)
        if wrong:
            raise RuntimeError(f"{self.name} is wrong without any fault: {wrong}")
        end = next(iter(found.values()))
        start_s, steps = first_s - self.job.began_s, max(map(len, entries))
        return Reference(end.model, end.loss, start_s, last_s - first_s, steps)

    def disturbed(self) -> Outcome:
        """Carry out a run with the fault."""
        fault = self.scenario.fault
        self.settings = replace(self.settings, **fault.settings(self))
        fault.prepare(self)
        places = [self.hosts.folder] if self.hosts else []
        before = Belongings(self.folder / TEMPORARY, *places, work=self.folder)
        again = self.scenario.expected == "resumes" and not self.goes_on_by_itself
        times = int(self.random.integers(1, self.scenario.most + 1))
        outcome = Outcome(self.key, self.name, self.number, undisturbed=self.reference.loss)
        struck: list[float] = []
        for start in range(TRIES):
            self._start()
            self.launcher_killed = False
            hits = start < times and fault.wait(self)
            since_s = self.struck_s = time.monotonic()
            if hits:
                outcome.faults.append(fault.strike(self))
                struck.append(self.struck_s)
                self._lose_others(outcome, struck)
            if not self.job.wait(self.limit_s):
                outcome.hung = True
                self.job.show_stacks()
                self.job.kill()
            outcome.code = self.job.process.returncode
            if hits:
                outcome.seconds = max(outcome.seconds, time.monotonic() - since_s)
            outcome.processes += processes_left()
            if not self.launcher_killed:
                outcome.files += before.left()
            if outcome.hung or not again or outcome.code == 0:
                break
            fault.undo(self)
        outcome.starts = start + 1
        outcome.missed = not outcome.faults
        if self.scenario.expected != "ends":
            self._measure(outcome, struck)
        if not outcome.hung:
            self._judge(outcome)
        if outcome.bad:
            outcome.said = self._said()
        return outcome

    def _lose_others(self, outcome: Outcome, struck: list[float]) -> None:
        for victim in self.victims[1:]:
            self.victim = victim
            if not self.wait_for_next():
                return
            self.struck_s = time.monotonic()
            signalled(self.pid(victim), signal.SIGKILL)
            outcome.faults.append(f"SIGKILL to rank {victim} in {self.place(victim)}")
            struck.append(self.struck_s)

    def _start(self) -> None:
        self._books = []
        scenario, extra = self.scenario, self.scenario.spares
        inside, options, environ = [], list(scenario.options), {}
        if self.hosts:
            inside, environ = self.hosts.inside, self.hosts.environment
            options += self.hosts.run_options
        if self.family.servers:
            options += ["--servers", str(self.family.servers)]
        self.job = Job(
            *("child", asdict(self.settings), self.folder, self.ranks + extra, options),
            inside=inside,
            environ=environ,
        )

    def _measure(self, outcome: Outcome, struck: Sequence[float]) -> None:
        """Measure the cost of each fault."""
        books = diaries(self.folder)
        for since_s, until_s in pairwise([*struck, math.inf]):
            outcome.lost_samples.append(lost_samples(books, since_s, until_s))
            again = self.scenario.expected == "resumes"
            seconds = recovery_s(books, since_s, started_again=again)
            if seconds is not None:
                outcome.recovery_s.append(seconds)

    def _judge(self, outcome: Outcome) -> None:
        """Judge whether the outcome is expected, and the result right."""
        found, left, expected = ends(self.folder), self.ranks, self.scenario.expected
        same, loss = self._same(), self.reference.loss
        if expected == "ends" and not outcome.missed:
            if outcome.code != 0:
                outcome.met = True
                return
            outcome.missed = len(found) == left  # else it has ended as if all were well
        elif expected == "survives" and not outcome.missed:
            struck = list(zip(self.victims, outcome.faults, strict=False))
            early = [fault for victim, fault in struck if victim not in found]
            if early:
                left = left - len(early) + self._replaced()
                same = same if left == self.ranks and self.family.repeats_replaced else None
                outcome.faults = early
            outcome.missed = not early  # they had written their ends
        outcome.met = outcome.code == 0 and len(found) >= left
        if outcome.met:
            outcome.wrong = wrong_result(found, left, same, loss)
            outcome.loss = next(iter(found.values())).loss

    def _replaced(self) -> bool:
        """Return whether a spare must have replaced the victim: not after the end of training."""
        last = [book.place for book in diaries(self.folder) if book.rank == self.victim]
        return self.scenario.spares > 0 and Place.FINISH not in last[-1:]

    def _same(self) -> str | None:
        """Return the required model, bit for bit; None: any."""
        return self.reference.model if self.family.repeats else None

    def _said(self) -> str:
        return (self.folder / OUTPUT).read_text(errors="replace")[-OUTPUT_AT_MOST:]

    def clear(self) -> None:
        """Undo the fault's effect on the machine."""
        if hasattr(self, "job"):
            self.job.kill()
        self.scenario.fault.clear(self)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
