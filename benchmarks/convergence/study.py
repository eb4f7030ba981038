"""The plan of the comparison: tune on some seeds, report others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..statistics import Comparison, compare
from .contenders import CONTENDERS, Contender, Options, gain
from .runs import Runs
from .tasks import TASKS, Task
from .training import FIRST_TUNING_SEED, Run

RATES = tuple(0.0125 * 2**i for i in range(11))  # to 12.8
ADAM_RATES = tuple(0.00075 * 2**i for i in range(6))  # to 0.024
START = {"SGD": 5, "Adam": 2}  # 0.4, 0.003
UNIT_GAIN: Options = (("block_momentum", 0.8), ("block_learning_rate", 0.2))


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        tasks: by name.
        seeds: that are reported, from 0 on.
        tuning_seeds: that rates are chosen on, from `FIRST_TUNING_SEED` on; None: each task's.
        ranks: the K that take part; None: all of each contender's.
        shortened: so many times fewer samples than the tasks have.
    """

    tasks: Sequence[str]
    seeds: int = 10
    tuning_seeds: int | None = None
    ranks: Sequence[int] | None = None
    shortened: int = 1

    def task(self, name: str) -> Task:
        task = TASKS[name]
        return replace(
            task,
            samples=task.samples // self.shortened,
            tuning_seeds=self.tuning_seeds or task.tuning_seeds,
        )

    def ranks_of(self, contender: Contender) -> list[int]:
        return [k for k in contender.ranks if k == 1 or self.ranks is None or k in self.ranks]


@dataclass(frozen=True)
class Setting:
    """A line of the result.

    Attributes:
        task, contender: by name.
        ranks: how many.
        rates: where learning rate and options come from: "tuned" here, "equal" to those tuned for
            serial SGD, "as 32 bits": those tuned for what this is the compressed form of, "gain 1":
            model averaging's, with a gain as of model averaging.
        lr, options: what they are.
        at_edge: the rate is the first or last of the grid: a better one may lie beyond.
    """

    task: str
    contender: str
    ranks: int
    rates: str
    lr: float
    options: Options = ()
    at_edge: bool = False

    def runs(self, samples: int, seeds: Iterable[int]) -> list[Run]:
        return [
            Run(self.task, self.contender, self.ranks, self.lr, self.options, seed, samples)
            for seed in seeds
        ]

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.task, self.contender, self.ranks, self.rates


@dataclass(frozen=True)
class Result:
    """
    Attributes:
        setting: what was run.
        losses: [seeds, points], test loss in nats.
        bytes_sent: by all ranks together in a run.
    """

    setting: Setting
    losses: npt.NDArray[np.float64]
    bytes_sent: int

    @property
    def final(self) -> npt.NDArray[np.float64]:
        return self.losses[:, -1]

    @property
    def gain(self) -> float:
        setting, contender = self.setting, CONTENDERS[self.setting.contender]
        return gain(contender.algorithm(setting.options, 1), setting.ranks)


@dataclass
class Results:
    """All results, by `Setting.key`, and the plan that they follow."""

    plan: Plan
    all: dict[tuple[str, str, int, str], Result] = field(default_factory=dict)

    def of(self, task: str) -> list[Result]:
        return [result for key, result in self.all.items() if key[0] == task]

    def serial(self, task: str) -> Result:
        return self.all[task, "serial", 1, "tuned"]

    def peer(self, result: Result) -> Result | None:
        """What a result is compared with beside serial SGD: on as many ranks, or on one, with
        rates from the same place or else tuned."""
        task, contender, ranks, rates = result.setting.key
        name = CONTENDERS[contender].peer
        for k, where in ((ranks, rates), (ranks, "tuned"), (1, "tuned")):
            if name and (task, name, k, where) in self.all:
                return self.all[task, name, k, where]
        return None

    def compare(self, ours: Result, theirs: Result) -> Comparison:
        return compare(ours.final, theirs.final, TASKS[ours.setting.task].margin)


def study(plan: Plan, runs: Runs) -> Results:
    """Carry out the plan: tune, then run what is reported."""
    settings = [setting for task in plan.tasks for setting in _settings(task, plan, runs)]
    wanted = {
        setting: setting.runs(plan.task(setting.task).samples, range(plan.seeds))
        for setting in settings
    }
    outcomes = runs(run for by_seed in wanted.values() for run in by_seed)
    results = Results(plan)
    for setting, by_seed in wanted.items():
        losses = np.array([outcomes[run].losses for run in by_seed])
        sent = max(outcomes[run].bytes_sent for run in by_seed)  # 0 where a run has broken off
        results.all[setting.key] = Result(setting, losses, sent)
    return results


def _settings(task: str, plan: Plan, runs: Runs) -> list[Setting]:
    """Everything that is reported of a task, in the order of the contenders."""
    best = _tuned(task, plan, runs)
    settings = []
    for name, contender in CONTENDERS.items():
        for k in plan.ranks_of(contender):
            tuned = best.get((name, k))
            if tuned:
                settings.append(tuned)
            if contender.compressed_from:
                whole = best[contender.compressed_from, k]
                settings.append(Setting(task, name, k, "as 32 bits", whole.lr, whole.options))
            elif contender.as_serial and k > 1:
                settings.append(Setting(task, name, k, "equal", best["serial", 1].lr))
            if name == "BMUF":
                lr = best["averaging", k].lr
                settings.append(Setting(task, name, k, "gain 1", lr, UNIT_GAIN))
    return settings


def _tuned(task: str, plan: Plan, runs: Runs) -> dict[tuple[str, int], Setting]:
    """The best setting of each contender on each K: of all its options, the best rate."""
    climbs = [
        Climb(task, name, k, options, ADAM_RATES if contender.adam else RATES)
        for name, contender in CONTENDERS.items()
        for k in plan.ranks_of(contender)
        for options in contender.tuned
    ]
    samples, tuning_seeds = plan.task(task).samples, plan.task(task).tuning_seeds
    seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + tuning_seeds)
    while True:
        steps = [
            (climb, i, climb.setting(i).runs(samples, seeds))
            for climb in climbs
            for i in climb.next_points()
        ]
        if not steps:
            break
        outcomes = runs(run for _, _, by_seed in steps for run in by_seed)
        for climb, i, by_seed in steps:
            climb.scores[i] = float(np.mean([outcomes[run].losses[-1] for run in by_seed]))
    best: dict[tuple[str, int], tuple[float, Setting]] = {}
    for climb in climbs:
        i = climb.best
        candidate, key = (climb.scores[i], climb.setting(i)), (climb.contender, climb.ranks)
        if key not in best or candidate[0] < best[key][0]:
            best[key] = candidate
    return {key: setting for key, (_, setting) in best.items()}


@dataclass
class Climb:
    """The search for the best rate of a grid: downhill, until both neighbours are worse."""

    task: str
    contender: str
    ranks: int
    options: Options
    grid: Sequence[float]
    scores: dict[int, float] = field(default_factory=dict)

    @property
    def best(self) -> int:
        return min(sorted(self.scores), key=self.scores.__getitem__)

    def next_points(self) -> list[int]:
        """Where on the grid a loss is still to be measured; empty at the end."""
        middle = self.best if self.scores else START["Adam" if self.grid is ADAM_RATES else "SGD"]
        around = range(max(middle - 1, 0), min(middle + 2, len(self.grid)))
        return [i for i in around if i not in self.scores]

    def setting(self, i: int) -> Setting:
        at_edge = i in (0, len(self.grid) - 1)
        return Setting(
            self.task, self.contender, self.ranks, "tuned", self.grid[i], self.options, at_edge
        )
