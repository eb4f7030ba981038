"""A soak: a long training, and learners without end; memory, files and threads must be flat."""

from __future__ import annotations

import os
import textwrap
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..panels import COLORS, FilePath, Label, label_ends, panels
from ..report import Report, machine, table
from .diary import diaries
from .job import Job, Settings, processes_left
from .programs import STOP

PARTS = {"one training": "train", "learners made and closed": "learners"}  #: and programs
SAVE_EVERY = 20_000  #: samples
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
    """The samples of all processes, in `minutes` for both parts together."""

    ranks: int
    minutes: float
    samples: list[Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  #: failed jobs, and leftovers, in words
    machine: dict[str, Any] = field(default_factory=machine)

    def lines(self) -> dict[tuple[str, int], list[Sample]]:
        """Return the samples of each process, by its part and rank."""
        lines: dict[tuple[str, int], list[Sample]] = {}
        for sample in sorted(self.samples, key=lambda s: (s.part, s.rank)):
            lines.setdefault((sample.part, sample.rank), []).append(sample)
        return lines


class Growth(NamedTuple):
    """The growth of a quantity in a process, from the end of the warm-up to the end, by the slope;
    `first` and `last` are medians then."""

    part: str
    rank: int
    quantity: str
    first: float
    last: float
    growth: float
    limit: float
    flat: bool


def measure(folder: Path, ranks: int, seconds: float) -> Soak:
    """Run both parts in turn, for half of the time each."""
    result = Soak(ranks, seconds / 60)
    for part, program in PARTS.items():
        own = folder / program
        own.mkdir()
        job = Job(program, Settings(str(own), "overlap", SAVE_EVERY, 120, endless=True), ranks)
        while not job.wait(seconds / 2 / SAMPLES):
            time_s = time.monotonic() - job.began_s
            if time_s >= seconds / 2:
                break
            for book in diaries(own):
                with suppress(FileNotFoundError, ProcessLookupError):  # it is just ending
                    result.samples.append(Sample(part, book.rank, time_s, *used(book.pid)))
        early = job.ended
        (own / STOP).touch()
        if not job.wait(STOPS_S):
            result.problems.append(f"{part}: it did not stop within {STOPS_S:g} s")
            job.give_up()
        if early or job.process.returncode != 0:
            result.problems.append(f"{part}: exit code {job.process.returncode}: {job.said}")
        result.problems += [f"{part}: left {line}" for line in processes_left()]
    return result


def used(pid: int) -> tuple[float, float, float]:
    """Return private resident memory in MiB, open files, and threads."""
    status = Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines())
    memory = float(values["RssAnon"].split()[0]) / 1024
    return memory, float(len(os.listdir(f"/proc/{pid}/fd"))), float(values["Threads"])


def growths(soak: Soak) -> list[Growth]:
    """Return the growth of every quantity in every process with enough samples.

    The slope is the median of the slopes between any two points (Theil, Sen).
    """
    found = []
    for (part, rank), own in soak.lines().items():
        warm = own[int(WARM * len(own)) :]
        if len(warm) < 4:
            continue
        times, few = np.array([sample.time_s for sample in warm]), max(1, len(warm) // 5)
        a, b = np.triu_indices(len(warm), 1)
        for quantity, limit in LIMITS.items():
            values = np.array([float(getattr(sample, quantity)) for sample in warm])
            first, last = float(np.median(values[:few])), float(np.median(values[-few:]))
            slope = np.median((values[b] - values[a]) / (times[b] - times[a]))
            growth = float(slope * (times[-1] - times[0]))
            if quantity == "memory_mib":
                limit = max(limit, SHARE * first)
            flat = growth <= limit
            found.append(Growth(part, rank, quantity, first, last, growth, limit, flat))
    return found


class Soaked(Report):
    """A table, a JSON file and a figure of a soak."""

    def __init__(self, soak: Soak) -> None:
        super().__init__(f"A soak of {soak.minutes:g} minutes on {soak.ranks} ranks")
        self.soak, self.growths = soak, growths(soak)
        grow = sum(not one.flat for one in self.growths)
        self.count = f"{len(self.growths)} quantities, of which {grow} grow."

    def print(self) -> None:
        rows = [
            (part, str(rank), QUANTITIES[quantity], *(f"{number:.1f}" for number in numbers),
             "flat" if flat else "GROWS")
            for part, rank, quantity, *numbers, flat in self.growths
        ]  # fmt: skip
        lines = table(("", "rank", "", "warm", "end", "growth", "limit", ""), rows)
        print(f"\n{self.title}\n", *lines, "", self.count, *self.soak.problems, sep="\n")

    def content(self) -> dict[str, Any]:
        return {"title": self.title, **asdict(self.soak)}

    def draw(self, path: FilePath) -> None:
        """Draw a panel for each quantity, a line for each process."""
        colors = dict(zip(PARTS, (COLORS["measured"], COLORS["also measured"]), strict=True))
        title, notes = f"{self.title}: a line for each rank", [self.count]
        with panels(
            QUANTITIES, path, title, columns=1, height=1.6, notes=notes, sharex=True
        ) as grid:
            for name, axes in grid.items():
                ends = {}
                for (part, _), own in self.soak.lines().items():
                    x, y = [s.time_s / 60 for s in own], [getattr(s, name) for s in own]
                    axes.plot(x, y, color=colors[part], linewidth=1, alpha=0.7)
                    ends[part] = Label(textwrap.fill(part, 14), x[-1], y[-1], colors[part])
                axes.set_ylim(bottom=0)
                axes.margins(x=0.01)
                label_ends(axes, [*ends.values()])
            axes.set_xlabel("minutes")
