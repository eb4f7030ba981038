"""The study of all algorithms on K logical ranks against serial SGD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..statistics import Comparison, bootstrap_interval
from .contenders import ALGORITHMS, Contender, Options, gain
from .runs import Runs
from .study import Plan, Study, Style, comparison_cells, loss_axis, parts
from .task import Task
from .tuning import Climb, Result, Setting, uncompressed_bytes

STUDIED = ("digits", "bytes")  #: tasks
UNIT_GAIN: Options = (("block_momentum", 0.8), ("block_learning_rate", 0.2))


def carry_out(plan: Plan, runs: Runs) -> Algorithms:
    """Tune, then run the reported seeds; results without a complete serial SGD are dropped."""
    settings = [
        setting
        for task in plan.tasks or STUDIED
        for setting in _settings(task, plan, _tuned(task, plan, runs))
    ]
    in_turn = sorted(settings, key=lambda setting: -setting.ranks)  # the longest ones first
    lines = [setting.report(plan.task(setting.task), plan.seeds) for setting in in_turn]
    found = {result.setting: result for result in runs.follow(lines) if result}
    groups: dict[str, list[Result]] = {}
    for setting in settings:
        if setting in found:
            groups.setdefault(setting.task, []).append(found[setting])
    return Algorithms(
        f"Test loss in nats, {plan.seeds} seeds",
        plan,
        {task: of for task, of in groups.items() if of[0].setting.contender == "serial"},
    )


def _settings(task: str, plan: Plan, best: dict[tuple[str, int], Setting]) -> list[Setting]:
    """Return all reported settings of a task, in the order of the contenders.

    Rates are "tuned"; "equal" to those of serial SGD; "as 32 bits": those of the contender that
    this one compresses; "gain 1": model averaging's, for block momentum with a gain of 1.
    """
    settings = []
    for name, contender in ALGORITHMS.items():
        for k in ranks_of(contender, plan):
            like = Setting(task, name, contender.optimizer, k, "as 32 bits", 0.0)
            if tuned := best.get((name, k)):
                settings.append(tuned)
            if contender.compressed_from:
                if whole := best.get((contender.compressed_from, k)):
                    settings.append(replace(like, lr=whole.lr, options=whole.options))
            elif contender.as_serial and k > 1 and (serial := best.get(("serial", 1))):
                settings.append(replace(like, rates="equal", lr=serial.lr))
            if name == "BMUF" and (mean := best.get(("averaging", k))):
                settings.append(replace(like, rates="gain 1", lr=mean.lr, options=UNIT_GAIN))
    return settings


def ranks_of(contender: Contender, plan: Plan) -> list[int]:
    """Return the numbers of ranks with which a contender takes part."""
    return [k for k in contender.ranks if k == 1 or plan.ranks is None or k in plan.ranks]


def _tuned(task: str, plan: Plan, runs: Runs) -> dict[tuple[str, int], Setting]:
    """Return the best setting of each contender on each K: of all its options, the best rate."""
    climbs = [
        Climb(task, name, contender.optimizer, k, options)
        for name, contender in ALGORITHMS.items()
        for k in ranks_of(contender, plan)
        for options in contender.tuned
    ]
    climbs.sort(key=lambda climb: -climb.ranks)  # the longest ones first
    settings = runs.follow([climb.tune(plan.task(task)) for climb in climbs])
    found: dict[tuple[str, int], list[tuple[float, Setting | None]]] = {}
    for climb, setting in zip(climbs, settings, strict=True):
        score = climb.search.score if setting else -np.inf  # nothing is best before all are known
        found.setdefault((climb.contender, climb.ranks), []).append((score, setting))
    best = {of: min(tried, key=lambda pair: pair[0])[1] for of, tried in found.items()}
    return {of: setting for of, setting in best.items() if setting}


class Algorithms(Study[str]):
    """The results of each task."""

    columns = (
        *("", "K", "rates", "lr", "η", "gain", "loss"),
        *("less serial SGD", "", "peer", "less it", ""),
    )
    styles: ClassVar[dict[str, Style]] = {
        "serial": ("black", "-"),
        "serial Adam": ("black", ":"),
        "32 bits": ("#4878a8", "-"),
        "1 bit": ("#4878a8", "--"),
        "1 bit without": ("#cc4444", "-"),
        "averaging": ("#e08214", "-"),
        "BMUF": ("#2a8a4a", "-"),
        "averaging 1 bit": ("#e08214", "--"),
        "BMUF 1 bit": ("#2a8a4a", "--"),
        "BMUF 2 bits": ("#2a8a4a", "-."),
        "BMUF 4 bits": ("#2a8a4a", (0, (5, 1, 1, 1, 1, 1))),
        "BMUF entropy 1": ("#1abc9c", "-"),
        "BMUF entropy 0.25": ("#1abc9c", "--"),
        "classical": ("#8bc34a", "-"),
        "CNTK": ("#8bc34a", ":"),
        "SlowMo": ("#8e5ea2", "-"),
        "DiLoCo": ("#8c6d4f", "-"),
        "averaging entropy 1": ("#f7b267", "-"),
        "averaging entropy 0.25": ("#f7b267", "--"),
        "SlowMo entropy 1": ("#c39bd3", "-"),
        "SlowMo entropy 0.25": ("#c39bd3", "--"),
        "DiLoCo entropy 1": ("#c8a882", "-"),
        "DiLoCo entropy 0.25": ("#c8a882", "--"),
    }

    def task_of(self, group: str) -> Task:
        return self.plan.task(group)

    def heading(self, group: str) -> tuple[str, str]:
        task = self.task_of(group)
        return task.title, (
            f"{task.samples} samples, margin ±{task.margin:g}, "
            f"a rank's minibatch {task.minibatch}, blocks of {task.block} minibatches, "
            f"tuned on {task.tuning_seeds} other seeds"
        )

    def find(self, task: str, contender: str, ranks: int, rates: str) -> Result | None:
        """Return a result; None if there is none."""
        key = contender, ranks, rates
        return next((r for r in self.groups[task] if _key(r.setting) == key), None)

    def peer(self, result: Result) -> Result | None:
        """Return a result's peer: on as many ranks, or on one, with rates of the same kind or
        tuned ones."""
        contender, ranks, rates = _key(result.setting)
        name, task = ALGORITHMS[contender].peer, result.setting.task
        for k, where in ((ranks, rates), (ranks, "tuned"), (1, "tuned")):
            if name and (found := self.find(task, name, k, where)):
                return found
        return None

    def add_rows(self, group: str, result: Result) -> None:
        setting, serial, peer = result.setting, self.groups[group][0], self.peer(result)
        name = f"{group}, {label(result)}"
        loss, reference = result.final.mean(), serial.final.mean()
        beside = (
            f"serial SGD, {reference:.4f}; {how(result)}; {self.task_of(group).samples} samples"
        )
        self.add(f"{name}: test loss", loss, "nats", beside, loss / reference)
        if result is not serial:
            self._add(f"{name}, less serial SGD", self.paired(result, serial))
        if peer:
            self._add(f"{name}, less {label(peer)}", self.paired(result, peer))
        if result.bytes_sent:
            sent = result.bytes_sent / setting.ranks
            whole = uncompressed_bytes(self.task_of(group), setting.ranks)
            beside = f"32 bits in every minibatch, {whole:.0f}; by all ranks {result.bytes_sent}"
            self.add(f"{name}: sent by a rank", sent, "bytes", beside, sent / whole)

    def _add(self, name: str, comparison: Comparison) -> None:
        said = f"{comparison}: {comparison.verdict}"
        self.add(name, comparison.mean, "nats", said, comparison.reach)

    def cells(self, group: str, result: Result) -> Sequence[str]:
        setting, serial, peer = result.setting, self.groups[group][0], self.peer(result)
        momentum = dict(setting.options).get("block_momentum")
        return (
            ALGORITHMS[setting.contender].title,
            str(setting.ranks),
            setting.rates,
            f"{setting.lr:g}{'*' if setting.at_edge else ''}",
            "" if momentum is None else f"{momentum:g}",
            f"{gain_of(result):g}",
            f"{result.final.mean():.4f}",
            *comparison_cells(self.paired(result, serial) if result is not serial else None),
            label(peer) if peer else "",
            *comparison_cells(self.paired(result, peer) if peer else None),
        )

    def figures(self) -> dict[str, Callable[[Path], None]]:
        more = {"ranks": self.by_ranks, "error-feedback": self.error_feedback}
        return super().figures() | more

    @property
    def shown_ranks(self) -> int:
        """K of the figures that show one: 8, or the largest below, or else the smallest."""
        counts = {r.setting.ranks for results in self.groups.values() for r in results} - {1}
        return max((k for k in counts if k <= 8), default=min(counts, default=1))

    def subtitle(self) -> str:
        return f"K = {self.shown_ranks}, tuned rates: mean of {self.plan.seeds} seeds"

    def shown(self, group: str) -> Sequence[Result]:
        return [
            result
            for result in self.groups[group]
            if result.setting.rates == ALGORITHMS[result.setting.contender].rates
            and result.setting.ranks in (1, self.shown_ranks)
            and result.setting.contender != "1 bit without"  # has a figure of its own, far above
        ]

    def by_ranks(self, path: Path) -> None:
        """Draw the final test loss against K: model averaging and block momentum."""
        lines = (
            ("averaging", "equal", "--", "o"),
            ("averaging", "tuned", "-", "o"),
            ("BMUF", "equal", "--", "s"),
            ("BMUF", "gain 1", ":", "s"),
            ("BMUF", "tuned", "-", "s"),
        )
        words = {"equal": "rate of serial SGD", "gain 1": "gain 1", "tuned": "tuned"}
        title = "After the same number of samples: mean and 95 % interval over seeds"
        with self.panels(path, title) as grid:
            for task, axes in grid.items():
                shown: set[int] = set()
                for i, (name, rates, style, marker) in enumerate(lines):
                    named = (name, rates)
                    points = [
                        result
                        for result in self.groups[task]
                        if (result.setting.contender, result.setting.rates) == named
                    ]
                    if not points:
                        continue
                    means = np.array([result.final.mean() for result in points])
                    ends = np.array([bootstrap_interval(result.final, 0.95) for result in points])
                    x = np.array([result.setting.ranks for result in points])
                    shown |= set(x.tolist())
                    axes.errorbar(
                        x * 2 ** (0.06 * (i - 2)),  # beside each other
                        means,
                        yerr=np.abs(ends.T - means),
                        color=self.styles[name][0],
                        linestyle=style,
                        marker=marker,
                        markersize=4,
                        capsize=3,
                        label=f"{ALGORITHMS[name].title}, {words[rates]}",
                    )
                serial = self.groups[task][0].final.mean()
                axes.axhline(serial, color="black", lw=1, label="serial SGD, tuned")
                axes.set_xscale("log", base=2)
                axes.set_xticks(sorted(shown), map(str, sorted(shown)))
                axes.minorticks_off()
                axes.set_xlabel("K, ranks")
                loss_axis(axes, self.task_of(task))

    def error_feedback(self, path: Path) -> None:
        """Draw the test loss of 32 bits, and of 1 bit with and without error feedback."""
        k = self.shown_ranks
        lines = (
            ("32 bits", "tuned", "#4878a8", "32 bits, tuned"),
            ("1 bit", "as 32 bits", "#2a8a4a", "1 bit with error feedback, rate of 32 bits"),
            ("1 bit without", "as 32 bits", "#cc4444", "1 bit without, rate of 32 bits"),
            ("1 bit without", "tuned", "#e08214", "1 bit without, tuned"),
        )
        title = f"Data-parallel SGD, K = {k}: mean and range of {self.plan.seeds} seeds"
        with self.panels(path, title) as grid:
            for task, axes in grid.items():
                for name, rates, color, text in lines:
                    if result := self.find(task, name, k, rates):
                        x = parts(result) * self.task_of(task).samples / 1000
                        curves = result.curves
                        axes.plot(x, curves.mean(0), color=color, linestyle="-", label=text)
                        ends = curves.min(0), curves.max(0)
                        axes.fill_between(x, *ends, color=color, alpha=0.15, linewidth=0)
                axes.set_xlabel("thousands of samples, of all ranks")
                loss_axis(axes, self.task_of(task))


def _key(setting: Setting) -> tuple[str, int, str]:
    return setting.contender, setting.ranks, setting.rates


def label(result: Result) -> str:
    """Name a result: "block momentum, K=8, tuned"."""
    setting = result.setting
    ranks = f", K={setting.ranks}" if setting.ranks > 1 else ""
    return f"{ALGORITHMS[setting.contender].title}{ranks}, {setting.rates}"


def gain_of(result: Result) -> float:
    setting = result.setting
    return gain(ALGORITHMS[setting.contender].algorithm(setting.options, 1), setting.ranks)


def how(result: Result) -> str:
    """Say rate, options, gain, and how many runs diverged."""
    options = [f"{name} {value:g}" for name, value in result.setting.options]
    texts = [result.rate, *options, f"gain {gain_of(result):g}", result.diverged]
    return ", ".join(filter(None, texts))
