"""A contender with a learning rate, its result, and the search for the rate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..study import Search
from .contenders import Options
from .optimizers import OPTIMIZERS
from .runs import Line
from .task import Task
from .tasks import TASKS
from .training import FIRST_TUNING_SEED, Run


@dataclass(frozen=True)
class Setting:
    """
    Attributes:
        task, contender, optimizer: by name.
        ranks: how many.
        rates: the origin of learning rate and options, in a word: "tuned" here.
        lr, options: of the run.
        at_edge: the rate is the first or last of the grid: a better rate may lie beyond.
    """

    task: str
    contender: str
    optimizer: str
    ranks: int
    rates: str
    lr: float
    options: Options = ()
    at_edge: bool = False

    def runs(self, task: Task, seeds: Iterable[int]) -> list[Run]:
        who = self.task, self.contender, self.optimizer, self.ranks, self.lr, self.options
        return [Run(*who, seed, task.budget(self.ranks)) for seed in seeds]

    def report(self, task: Task, seeds: int) -> Line[Result]:
        """Run the reported seeds: from 0 on."""
        by_seed = self.runs(task, range(seeds))
        outcomes = yield by_seed
        curves = np.array([outcomes[run].curve(task) for run in by_seed])
        counts = [outcomes[run].bytes_sent for run in by_seed]
        sent = [count for count in counts if count] or [0]  # 0 where a run has broken off
        return Result(self, curves, round(sum(sent) / len(sent)))


@dataclass(frozen=True)
class Result:
    """
    Attributes:
        setting: of the runs.
        curves: [seeds, points], in the task's measure: test losses in nats, for most.
        bytes_sent: by all ranks together in a run, on average.
    """

    setting: Setting
    curves: npt.NDArray[np.float64]
    bytes_sent: int

    @property
    def final(self) -> npt.NDArray[np.float64]:
        return self.curves[:, -1]

    @property
    def rate(self) -> str:
        """The rate in words."""
        edge = " (the last of the grid)" if self.setting.at_edge else ""
        return f"lr {self.setting.lr:g}{edge}"

    @property
    def diverged(self) -> str:
        """The number of runs counted as knowing nothing, in words; empty if none."""
        worst = round(TASKS[self.setting.task].worst, 4)
        diverged = int((self.final >= worst).sum())
        return f"{diverged} of {len(self.final)} diverged, counted as {worst}" if diverged else ""


@dataclass
class Climb:
    """The search for a contender's learning rate on the grid of the optimizer.

    Attributes:
        start: the rate to begin at; None: the optimizer's.
        search: by place on the grid.
    """

    task: str
    contender: str
    optimizer: str
    ranks: int
    options: Options = ()
    start: float | None = None

    def __post_init__(self) -> None:
        rule = OPTIMIZERS[self.optimizer]
        self.grid = rule.rates
        self.search = Search(self.grid.index(self.start or rule.start), len(self.grid))

    def setting(self, i: int) -> Setting:
        at_edge = i in (0, len(self.grid) - 1)
        who = self.task, self.contender, self.optimizer, self.ranks
        return Setting(*who, "tuned", self.grid[i], self.options, at_edge)

    def tune(self, task: Task) -> Line[Setting]:
        """Find the rate with the least mean loss on unreported seeds."""
        seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + task.tuning_seeds)
        best = yield from self.search.line(
            lambda i: self.setting(i).runs(task, seeds), lambda outcome: outcome.losses[-1]
        )
        return self.setting(best)


def uncompressed_bytes(task: Task, ranks: int) -> float:
    """Return the bytes of a rank in a run that exchanges every gradient with 32 bits."""
    return task.steps_on(ranks) * 2 * (ranks - 1) / ranks * task.values * 4
