"""The plan of the comparison: tune on some seeds, report others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...statistics import Comparison, compare
from ..contender import Options
from ..runs import Runs
from ..task import Task
from ..tasks import TASKS
from ..tuning import Climb, Result, Setting
from .contenders import CONTENDERS, Entrant

STUDIED = ("digits", "bytes")  #: tasks
UNIT_GAIN: Options = (("block_momentum", 0.8), ("block_learning_rate", 0.2))


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        tasks: by name.
        seeds: that are reported, from 0 on.
        tuning_seeds: how many others rates are chosen on; None: each task's.
        ranks: the K that take part; None: all of each contender's.
        shortened: so many times fewer samples than the tasks have.
    """

    tasks: Sequence[str] = STUDIED
    seeds: int = 10
    tuning_seeds: int | None = None
    ranks: Sequence[int] | None = None
    shortened: int = 1

    def task(self, name: str) -> Task:
        return TASKS[name].shortened(self.shortened, self.tuning_seeds)

    def ranks_of(self, contender: Entrant) -> list[int]:
        return [k for k in contender.ranks if k == 1 or self.ranks is None or k in self.ranks]


Key = tuple[str, str, int, str]


def key(setting: Setting) -> Key:
    """Task, contender, ranks, and where the rates come from: "tuned"; "equal" to those tuned for
    serial SGD; "as 32 bits": those tuned for what this is the compressed form of; "gain 1": model
    averaging's, with a gain as of model averaging."""
    return setting.task, setting.contender, setting.ranks, setting.rates


@dataclass
class Results:
    """All results, and the plan that they follow."""

    plan: Plan
    all: dict[Key, Result] = field(default_factory=dict)

    def of(self, task: str) -> list[Result]:
        return [result for (of, *_), result in self.all.items() if of == task]

    def serial(self, task: str) -> Result:
        return self.all[task, "serial", 1, "tuned"]

    def peer(self, result: Result) -> Result | None:
        """What a result is compared with beside serial SGD: on as many ranks, or on one, with
        rates from the same place or else tuned."""
        task, contender, ranks, rates = key(result.setting)
        name = CONTENDERS[contender].peer
        for k, where in ((ranks, rates), (ranks, "tuned"), (1, "tuned")):
            if name and (task, name, k, where) in self.all:
                return self.all[task, name, k, where]
        return None

    def compare(self, ours: Result, theirs: Result) -> Comparison:
        return compare(ours.final, theirs.final, TASKS[ours.setting.task].margin)


def study(plan: Plan, runs: Runs) -> Results:
    """Carry out the plan: tune, then run what is reported."""
    settings = [
        setting
        for task in plan.tasks
        for setting in _settings(task, plan, _tuned(task, plan, runs))
    ]
    results = Results(plan)
    in_turn = sorted(settings, key=lambda setting: -setting.ranks)  # the longest ones first
    lines = [setting.report(plan.task(setting.task), plan.seeds) for setting in in_turn]
    found = {key(result.setting): result for result in runs.follow(lines) if result}
    results.all |= {key(setting): found[key(setting)] for setting in settings}
    return results


def _settings(task: str, plan: Plan, best: dict[tuple[str, int], Setting]) -> list[Setting]:
    """Everything that is reported of a task, in the order of the contenders."""
    settings = []
    for name, contender in CONTENDERS.items():
        for k in plan.ranks_of(contender):
            like = Setting(task, name, contender.optimizer, k, "as 32 bits", 0.0)
            if tuned := best.get((name, k)):
                settings.append(tuned)
            if contender.compressed_from:
                whole = best[contender.compressed_from, k]
                settings.append(replace(like, lr=whole.lr, options=whole.options))
            elif contender.as_serial and k > 1:
                settings.append(replace(like, rates="equal", lr=best["serial", 1].lr))
            if name == "BMUF":
                lr = best["averaging", k].lr
                settings.append(replace(like, rates="gain 1", lr=lr, options=UNIT_GAIN))
    return settings


def _tuned(task: str, plan: Plan, runs: Runs) -> dict[tuple[str, int], Setting]:
    """The best setting of each contender on each K: of all its options, the best rate."""
    climbs = [
        Climb(task, name, contender.optimizer, k, options)
        for name, contender in CONTENDERS.items()
        for k in plan.ranks_of(contender)
        for options in contender.tuned
    ]
    climbs.sort(key=lambda climb: -climb.ranks)  # the longest ones first
    runs.follow([climb.tune(plan.task(task)) for climb in climbs])
    best: dict[tuple[str, int], Climb] = {}
    for climb in climbs:
        of = climb.contender, climb.ranks
        if of not in best or climb.search.score < best[of].search.score:
            best[of] = climb
    return {of: climb.setting(climb.search.best) for of, climb in best.items()}
