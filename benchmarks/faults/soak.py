"""A soak: a long training, and learners without end; memory, files and threads must be flat."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from ..panels import panels
from ..report import DrawnReport, machine, table
from .diary import diaries
from .endless import LEARNERS, STOP, TRAINING
from .job import OUTPUT, Job, processes_left

QUANTITIES = {"memory_mib": "memory, MiB", "descriptors": "open files", "threads": "threads"}
SAMPLES = 120  #: of a part, about
WARM = 0.3  #: of a part: what is taken once, is taken then
STOPS_S = 300.0

LIMITS = {"memory_mib": 4.0, "descriptors": 2.0, "threads": 1.0}
"""How much more of each may be there at the end of a part than after its warm-up, by the slope; of
memory at least 3 % of it."""
SHARE = 0.03


@dataclass(frozen=True)
class Sample:
    """The resources of a process at a time, in seconds since the beginning of its part."""

    part: str
    rank: int
    time_s: float
    memory_mib: float
    descriptors: float
    threads: float


@dataclass
class Soak:
    """
    Attributes:
        ranks: of each part.
        minutes: of both parts together.
        samples: of all processes.
        problems: failed jobs, and leftovers, in words.
        machine: of the measurement.
    """

    ranks: int
    minutes: float
    samples: list[Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=machine)


@dataclass(frozen=True)
class Growth:
    """The growth of a quantity in a process.

    Attributes:
        first, last: medians after the warm-up, and at the end.
        growth: from the end of the warm-up to the end, by the slope.
        limit: of the growth.
    """

    part: str
    rank: int
    quantity: str
    first: float
    last: float
    growth: float
    limit: float

    @property
    def flat(self) -> bool:
        return self.growth <= self.limit


def measure(folder: Path, ranks: int, seconds: float) -> Soak:
    """Run both parts in turn, for half of the time each."""
    result = Soak(ranks, seconds / 60)
    for number, part in enumerate((TRAINING, LEARNERS)):
        own = folder / f"soak-{number}"
        own.mkdir()
        job = Job("endless", {"folder": str(own), "part": part}, own, ranks)
        began_s = time.monotonic()
        every_s = seconds / 2 / SAMPLES
        while not job.wait(every_s) and time.monotonic() - began_s < seconds / 2:
            result.samples += samples(part, own, time.monotonic() - began_s)
        early = job.ended
        (own / STOP).touch()
        if not job.wait(STOPS_S):
            result.problems.append(f"{part}: it did not stop within {STOPS_S:g} s")
            job.show_stacks()
            job.kill()
        if early or job.process.returncode != 0:
            said = (own / OUTPUT).read_text(errors="replace")[-2000:]
            result.problems.append(f"{part}: exit code {job.process.returncode}: {said}")
        result.problems += [f"{part}: left {line}" for line in processes_left()]
    return result


def samples(part: str, folder: Path, time_s: float) -> list[Sample]:
    """Sample all living ranks."""
    found = []
    for book in diaries(folder):
        try:
            found.append(Sample(part, book.rank, time_s, *used(book.pid)))
        except (FileNotFoundError, ProcessLookupError):  # it is just ending
            continue
    return found


def used(pid: int) -> tuple[float, float, float]:
    """Return private resident memory in MiB, open files, and threads."""
    status = Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines())
    memory = float(values["RssAnon"].split()[0]) / 1024
    return memory, float(len(os.listdir(f"/proc/{pid}/fd"))), float(values["Threads"])


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the median slope between any two points (Theil, Sen).

    >>> slope([0, 1, 2, 3], [1, 2, 90, 4])
    1.0
    """
    pairs = combinations(zip(times, values, strict=True), 2)
    return statistics.median((y - v) / (x - u) for (u, v), (x, y) in pairs if x > u)


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Return the growth of every quantity in every process with enough samples."""
    found = []
    for part, rank in sorted({(sample.part, sample.rank) for sample in samples}):
        own = [s for s in samples if (s.part, s.rank) == (part, rank)]
        warm = own[int(WARM * len(own)) :]
        if len(warm) < 4:
            continue
        span_s, times = warm[-1].time_s - warm[0].time_s, [s.time_s for s in warm]
        for quantity in QUANTITIES:
            values = [float(getattr(sample, quantity)) for sample in warm]
            few = max(1, len(values) // 5)
            first, last = (statistics.median(v) for v in (values[:few], values[-few:]))
            limit = LIMITS[quantity]
            if quantity == "memory_mib":
                limit = max(limit, SHARE * first)
            growth = slope(times, values) * span_s
            found.append(Growth(part, rank, quantity, first, last, growth, limit))
    return found


class Soaked(DrawnReport):
    """A table, a JSON file and a figure of a soak."""

    def __init__(self, result: Soak) -> None:
        super().__init__(f"A soak of {result.minutes:g} minutes on {result.ranks} ranks")
        self.result, self.machine = result, result.machine

    def print(self) -> None:
        head = ("", "rank", "", "warm", "end", "growth", "limit", "")
        rows: list[tuple[str, ...]] = []
        for one in growths(self.result.samples):
            numbers = (f"{v:.1f}" for v in (one.first, one.last, one.growth, one.limit))
            flat = "flat" if one.flat else "GROWS"
            rows.append((one.part, str(one.rank), QUANTITIES[one.quantity], *numbers, flat))
        print(f"\n{self.title}\n", *table(head, rows), "", *self.notes(), sep="\n")

    def notes(self) -> list[str]:
        """Count the growing quantities, and list problems."""
        found = growths(self.result.samples)
        grows = sum(not one.flat for one in found)
        return [f"{len(found)} quantities, of which {grows} grow.", *self.result.problems]

    def content(self) -> dict[str, Any]:
        found = growths(self.result.samples)
        grown = [asdict(one) | {"flat": one.flat} for one in found]
        return {"title": self.title, **asdict(self.result), "growths": grown}

    def draw(self, path: str | os.PathLike[str]) -> None:
        draw_soak(self.result.samples, self.title, self.notes()[:1], Path(path))


def draw_soak(samples: Sequence[Sample], title: str, notes: Sequence[str], path: Path) -> None:
    """Draw a panel for each quantity, a line for each process."""
    size = 11.0, 2.7
    with panels(QUANTITIES, path, title, columns=1, size=size, notes=notes, sharex=True) as grid:
        for name, axes in grid.items():
            for part, rank in sorted({(sample.part, sample.rank) for sample in samples}):
                own = [s for s in samples if (s.part, s.rank) == (part, rank)]
                values = [getattr(sample, name) for sample in own]
                axes.plot([s.time_s / 60 for s in own], values, label=f"{part}, rank {rank}")
            axes.set_ylim(bottom=0)
        axes.set_xlabel("minutes")
