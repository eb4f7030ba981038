"""A run of a scenario: a job starts, a fault strikes, and the outcome is judged."""

from __future__ import annotations

import json
import math
import shutil
import signal
import statistics
import time
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from parallel_sgd.command_line.cluster import EmulatedHosts, emulated_hosts

from .diary import Place, diaries, lost_samples, recovery_s
from .families import FAMILIES
from .faults import RATE
from .job import belongings, files_left, processes_left
from .programs import End
from .results import Outcome
from .target import Reference, Scenario, Target

TRIES = 8  #: starts of one run, at most
UNDISTURBED = 5  #: runs of a family that does not repeat, whose losses are averaged

WORSE, MARGIN = 1.3, 0.03
"""A final loss is wrong beyond so many times an undisturbed run's, and so many nats more."""


class Bench(ExitStack):
    """The hosts and undisturbed runs of all disturbed runs. A `with` block.

    Args:
        ranks: in training and serving, spares apart.
        seed: of all moments and victims.
    """

    def __init__(self, folder: Path, ranks: int, seed: int) -> None:
        super().__init__()
        self.folder, self.ranks, self.seed = folder, ranks, seed
        self._references: dict[tuple[object, ...], Reference] = {}

    @cached_property
    def hosts(self) -> EmulatedHosts:
        """A host for each rank, and a spare host."""
        return self.enter_context(emulated_hosts(self.ranks + 1, RATE))

    def disturbed(self, scenario: Scenario, key: str, name: str, number: int) -> Outcome:
        """Carry out run `number` of a scenario, which is called `key`."""
        outcome = Outcome(key, name, number)
        target = self.target(scenario, key, name, number, self._reference(scenario, name))
        with target.traces:
            disturb(target, outcome)
        return outcome

    def target(
        self, scenario: Scenario, key: str, name: str, number: int, reference: Reference
    ) -> Target:
        """Return the target of a run, whose job has not started; its traces have the folder."""
        folder = self.folder / f"{key}-{name}-{number}"
        folder.mkdir()
        random = np.random.default_rng([self.seed, zlib.crc32(f"{key}/{name}".encode()), number])
        hosts = self.hosts if scenario.hosts else None
        target = Target(scenario, name, folder, self.ranks, reference, random, hosts)
        target.traces.callback(shutil.rmtree, folder, ignore_errors=True)
        return target

    def _reference(self, scenario: Scenario, name: str) -> Reference:
        """Return the result of undisturbed jobs, run once for all."""
        hosts, saves = scenario.hosts, scenario.saves
        case = name, hosts, saves
        if case not in self._references:
            calm = Scenario("nothing", scenario.fault, "goes on", hosts=hosts, saves=saves)
            found = []
            for number in range(1 if FAMILIES[name].repeats else UNDISTURBED):
                target = self.target(calm, "calm", name, number, Reference())
                with target.traces:
                    found.append(undisturbed(target))
            loss = statistics.fmean(reference.loss for reference in found)
            self._references[case] = replace(found[0], loss=loss)
        return self._references[case]


def undisturbed(target: Target) -> Reference:
    """Carry out an undisturbed run.

    Raises:
        RuntimeError: the run fails.
    """
    target.start()
    job, name = target.job, target.name
    if not job.wait(600) or job.process.returncode != 0:
        job.kill()
        raise RuntimeError(f"{name} fails without any fault: {job.said}")
    found = ends(target.folder)
    if wrong := wrong_result(found, target.ranks, None):
        raise RuntimeError(f"{name} is wrong without any fault: {wrong}")
    times = [book.entries()["time_s"] for book in diaries(target.folder) if book.steps]
    first_s, last_s, steps = min(map(min, times)), max(map(max, times)), max(map(len, times))
    end = next(iter(found.values()))
    return Reference(end.model, end.loss, first_s - job.began_s, last_s - first_s, steps)


def disturb(target: Target, outcome: Outcome) -> None:
    """Carry out a run with the fault, and write down its outcome."""
    scenario, fault = target.scenario, target.scenario.fault
    fault.prepare(target)
    before = belongings(target.folder, target.hosts)
    by_hand = scenario.expected == "resumes" and not scenario.restarts
    times = int(target.random.integers(1, scenario.most + 1))
    for start in range(TRIES):
        target.start()
        job = target.job
        target.traces.callback(job.kill)
        strikes = start < times and fault.wait(target)
        since_s = time.monotonic()
        if strikes:
            target.struck.append(since_s)
            outcome.faults.append(fault.strike(target))
            for victim in target.victims[1:]:
                target.victim = victim
                if not target.wait_for_next():
                    break
                target.struck.append(time.monotonic())
                outcome.faults.append(target.signal_victim(signal.SIGKILL))
        if not job.wait(target.limit_s):
            outcome.hung = True
            job.give_up()
        outcome.code = job.process.returncode
        if strikes:
            outcome.seconds = max(outcome.seconds, time.monotonic() - since_s)
        outcome.left += processes_left()
        if not target.launcher_killed:
            outcome.left += files_left(before, target.folder, target.hosts)
        if outcome.hung or not by_hand or outcome.code == 0:
            break
        target.repair()
    outcome.missed = not outcome.faults
    if scenario.expected != "ends":
        books, again = diaries(target.folder), scenario.expected == "resumes"
        for struck_s, until_s in pairwise([*target.struck, math.inf]):
            outcome.lost_samples.append(lost_samples(books, struck_s, until_s))
            seconds = recovery_s(books, struck_s, started_again=again)
            outcome.recovery_s += [] if seconds is None else [seconds]
    if not outcome.hung:
        judge(target, outcome)
    if outcome.bad:
        outcome.said = target.job.said


def judge(target: Target, outcome: Outcome) -> None:
    """Judge whether the outcome is expected, and the result right."""
    found, left, expected = ends(target.folder), target.ranks, target.scenario.expected
    outcome.undisturbed = target.reference.loss
    same = target.reference.model if target.family.repeats else None
    if expected == "ends" and not outcome.missed:
        if outcome.code != 0:
            outcome.met = True
            return
        outcome.missed = len(found) == left  # else it has ended as if all were well
    elif expected == "survives" and not outcome.missed:
        struck = list(zip(target.victims, outcome.faults, strict=False))
        early = [fault for victim, fault in struck if victim not in found]
        if early:
            left = left - len(early) + must_replace(target)
            same = same if left == target.ranks and target.family.repeats_replaced else None
            outcome.faults = early
        outcome.missed = not early  # they had written their ends
    outcome.met = outcome.code == 0 and len(found) >= left
    if outcome.met:
        outcome.wrong = wrong_result(found, left, same, target.reference.loss)
        outcome.loss = next(iter(found.values())).loss


def ends(folder: Path) -> dict[int, End]:
    """Return the ends of all finished ranks, by rank."""
    paths = folder.glob("end-*.json")
    return {int(path.stem.split("-")[1]): End(**json.loads(path.read_text())) for path in paths}


def must_replace(target: Target) -> bool:
    """Return whether a spare must have replaced the victim: not after the end of training."""
    books = target.books(target.victim)
    return target.scenario.spares > 0 and not (books and books[-1].place == Place.FINISH)


def wrong_result(
    ends: Mapping[int, End], ranks: int, model: str | None, loss: float = math.inf
) -> str:
    """Say in words why the result of a run is wrong; empty if right.

    Args:
        ranks: required number of ends.
        model: required checksum; None: any.
        loss: of an undisturbed run, in nats.
    """
    if len(ends) < ranks:
        return f"{len(ends)} of {ranks} ranks have come to their end"
    models = {end.model for end in ends.values()}
    if len(models) > 1:
        return f"the ranks hold {len(models)} different models"
    if model is not None and models != {model}:
        return "the model is not that of an undisturbed run"
    found = next(iter(ends.values())).loss
    if not math.isfinite(found) or found > WORSE * loss + MARGIN:
        return f"the loss is {found:.3f} nats, and undisturbed {loss:.3f}"
    return ""
