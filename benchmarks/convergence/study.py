"""A study: results in groups, each with a table, and a panel in every figure."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from ..panels import Axes, panels
from ..report import DrawnReport, table
from ..statistics import Comparison, compare
from .contenders import CONTENDERS
from .task import Task
from .tasks import TASKS
from .tuning import Result

Group = TypeVar("Group")
Style = tuple[str, Any]  #: color, and dashes as matplotlib takes them

TICKS = [m * e for e in (0.01, 0.1, 1) for m in (1, 2, 3, 5)]


@dataclass(frozen=True)
class Plan:
    """The part of a study that is carried out.

    Attributes:
        tasks, ranks, optimizers, contenders: of the runs; None: all of the study.
        seeds: reported ones, from 0 on.
        tuning_seeds: how many more seeds rates are chosen on; None: each task's.
        shortened: how many times fewer samples, or steps, than the tasks have.
    """

    tasks: Sequence[str] | None = None
    ranks: Sequence[int] | None = None
    optimizers: Sequence[str] | None = None
    contenders: Sequence[str] | None = None
    seeds: int = 10
    tuning_seeds: int | None = None
    shortened: int = 1

    def task(self, name: str) -> Task:
        return TASKS[name].shortened(self.shortened, self.tuning_seeds)


class Study(DrawnReport, Generic[Group]):
    """A report on results in groups.

    Args:
        title: of the report.
        plan: what was carried out.
        groups: the complete results.
    """

    columns: ClassVar[Sequence[str]]  #: of the tables; {} is the task's measure
    wide: ClassVar[int] = 2  #: panels side by side
    styles: ClassVar[Mapping[str, Style]]  #: of the contenders' lines

    def __init__(self, title: str, plan: Plan, groups: Mapping[Group, Sequence[Result]]) -> None:
        super().__init__(title)
        self.plan, self.groups = plan, groups
        for group, results in groups.items():
            for result in results:
                self.add_rows(group, result)

    @abstractmethod
    def add_rows(self, group: Group, result: Result) -> None:
        """Add a result to the rows of the JSON file."""

    @abstractmethod
    def cells(self, group: Group, result: Result) -> Sequence[str]:
        """Return a result's line in the table."""

    @abstractmethod
    def heading(self, group: Group) -> tuple[str, str]:
        """Return the title of a group, and more about it for the table."""

    @abstractmethod
    def task_of(self, group: Group) -> Task:
        """Return the task of a group, shortened as the plan says."""

    @abstractmethod
    def subtitle(self) -> str:
        """Return the title of the figures by samples and by bytes."""

    def shown(self, group: Group) -> Sequence[Result]:
        """Return the results in the figures by samples and by bytes."""
        return self.groups[group]

    def figures(self) -> dict[str, Callable[[Path], None]]:
        """Return how each figure is drawn, by the ending of its file's name."""
        return {"samples": self.by_samples, "bytes": self.by_bytes}

    def print(self) -> None:
        """Print a line for every result; the rows are for files."""
        print(f"\n{self.title}")
        for group, results in self.groups.items():
            head = [text.format(self.task_of(group).measure.name) for text in self.columns]
            lines = table(head, [self.cells(group, result) for result in results])
            print("\n" + ": ".join(self.heading(group)), "", *lines, sep="\n")

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw several figures: convergence.png means convergence-samples.png and more."""
        path = Path(path)
        for name, draw in self.figures().items() if self.groups else ():
            draw(path.with_name(f"{path.stem}-{name}{path.suffix}"))

    def paired(self, ours: Result, theirs: Result) -> Comparison:
        """Compare the ends of two results, paired by seed."""
        return compare(ours.final, theirs.final, TASKS[ours.setting.task].margin)

    def panels(self, path: Path, title: str) -> AbstractContextManager[dict[Group, Axes]]:
        """Open a panel for each group."""
        titles = {group: self.heading(group)[0] for group in self.groups}
        return panels(titles, path, title, columns=self.wide)

    def by_samples(self, path: Path) -> None:
        """Draw the test loss, or error, against samples."""
        with self.panels(path, self.subtitle()) as grid:
            for group, axes in grid.items():
                for result in self.shown(group):
                    budget = self.task_of(group).budget(result.setting.ranks)
                    self._plot(axes, parts(result) * budget / 1000, result)
                axes.set_xlabel("thousands of samples, of all ranks")
                loss_axis(axes, self.task_of(group))

    def by_bytes(self, path: Path) -> None:
        """Draw the test loss, or error, against bytes; of serial SGD its end."""
        with self.panels(path, self.subtitle()) as grid:
            for group, axes in grid.items():
                for result in self.shown(group):
                    ranks = result.setting.ranks
                    if ranks == 1 and result.setting.contender == "serial":
                        label = "serial SGD, at its end"
                        axes.axhline(result.final.mean(), color="black", lw=1, label=label)
                    elif ranks > 1 and result.bytes_sent:
                        sent = parts(result) * result.bytes_sent / ranks / 1e6
                        self._plot(axes, sent, result)
                axes.set_xscale("log")
                axes.set_xlabel("MB sent by a rank")
                loss_axis(axes, self.task_of(group))

    def _plot(self, axes: Axes, x: Any, result: Result) -> None:
        name = result.setting.contender
        color, style = self.styles[name]
        label = CONTENDERS[name].title
        axes.plot(x, result.curves.mean(axis=0), color=color, linestyle=style, label=label)


def parts(result: Result) -> Any:
    """Return the part of a run that each point of a curve ends."""
    points = result.curves.shape[1]
    return np.arange(1, points + 1) / points


def loss_axis(axes: Axes, task: Task) -> None:
    """Name a task's measure on the axis, and set its scale."""
    axes.set_ylabel(f"{task.measure.name}, {task.measure.unit}")
    if task.log_scale:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        ticks = [tick for tick in TICKS if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()


def comparison_cells(comparison: Comparison | None) -> tuple[str, str]:
    """Return the mean difference with its interval, and the verdict."""
    if comparison is None:
        return "", ""
    low, high = comparison.interval_95
    return f"{comparison.mean:+.4f} ({low:+.4f} to {high:+.4f})", comparison.verdict
