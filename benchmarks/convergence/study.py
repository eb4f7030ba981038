"""A study: the rates and results of its cells, and a report on these."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel_sgd.command_line.units import rate_text

from ..report import Report, machine, table
from ..statistics import Comparison, compare
from ..study import Runs
from .cells import Cell, Line
from .contenders import CONTENDERS, Options
from .optimizers import OPTIMIZERS
from .seconds import seconds_of
from .task import Task
from .tasks import TASKS
from .training import FIRST_TUNING_SEED, Outcome, Run

Groups = Mapping[Cell, Sequence["Result"]]
Figures = Mapping[str, Callable[[Groups, Path], None]]

UNIT_GAIN: Options = (("block_momentum", 0.8), ("block_learning_rate", 0.2))


@dataclass(frozen=True)
class Result:
    """
    Attributes:
        line: of the table.
        run: of the first seed.
        curves: [seeds, points], test losses in nats.
        bytes_sent: by all ranks together in a run, on average.
    """

    line: Line
    run: Run
    curves: npt.NDArray[np.float64]
    bytes_sent: int

    @property
    def final(self) -> npt.NDArray[np.float64]:
        return self.curves[:, -1]

    @property
    def title(self) -> str:
        return CONTENDERS[self.line.contender].title

    @property
    def mb_of_rank(self) -> float:
        """Return the megabytes sent by a rank, on average."""
        return self.bytes_sent / self.line.ranks / 1e6

    def __str__(self) -> str:
        ranks = f", K={self.line.ranks}" if self.line.ranks > 1 else ""
        return f"{self.title}{ranks}, {self.line.rates}"

    def bits_sent(self, task: Task) -> float | None:
        """Return the bits of each value and minibatch, with all overhead; None if none was sent."""
        k = self.line.ranks
        if not self.bytes_sent:
            return None
        whole = task.steps_on(k) * 2 * (k - 1) * task.values * 4  # every gradient in 32 bits
        return 32 * self.bytes_sent / whole


@dataclass(frozen=True)
class Tuner:
    """The source of results.

    Attributes:
        seeds: reported ones, from 0 on.
        tuning_seeds: how many more seeds rates are chosen on; None: each task's.
    """

    runs: Runs[Run, Outcome]
    seeds: int = 10
    tuning_seeds: int | None = None

    def result(self, cell: Cell, line: Line) -> Result:
        """Find the rate, then run the reported seeds.

        Raises:
            MissingRun: see `Runs.outcomes_of`.
        """
        run = self.run(cell, line)
        outcomes = self.runs.outcomes_of([replace(run, seed=seed) for seed in range(self.seeds)])
        curves = [outcome.losses for outcome in outcomes]
        sent = [outcome.bytes_sent for outcome in outcomes if outcome.bytes_sent] or [0]
        return Result(line, run, np.array(curves), round(sum(sent) / len(sent)))

    def run(self, cell: Cell, line: Line) -> Run:
        """Return the run of a line with the first seed."""
        if line.rates == "tuned":
            return self.tuned(cell, line)
        peer = Line(CONTENDERS[line.contender].peer or "", line.ranks, "tuned")
        tuned = self.tuned(cell, next(cell.lines()) if line.rates == "equal" else peer)
        options = UNIT_GAIN if line.rates == "gain 1" else tuned.options
        return cell.run(line, tuned.lr, options)

    def tuned(self, cell: Cell, line: Line) -> Run:
        """Return the run with the options and the rate of least mean loss on unreported seeds."""
        grid = OPTIMIZERS[cell.optimizer_of(line.contender)].rates
        start = grid.index(cell.start_of(line.contender))
        count = self.tuning_seeds or TASKS[cell.task].tuning_seeds
        seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + count)
        found: dict[Run, float] = {}
        for options in CONTENDERS[line.contender].tuned:

            def runs_at(i: int, options: Options = options) -> list[Run]:
                return [replace(cell.run(line, grid[i], options), seed=seed) for seed in seeds]

            search = self.runs.search(start, len(grid), runs_at, lambda one: one.losses[-1])
            found[cell.run(line, grid[search.best], options)] = search.scores[search.best]
        return min(found, key=found.__getitem__)


def results_of(cells: Iterable[Cell], tuner: Tuner, ranks: Sequence[int] | None = None) -> Groups:
    """Return the complete results of each cell, without cells whose first line is incomplete.

    Args:
        ranks: numbers of ranks, beside 1; None: all.
    """
    wanted = [(cell, line) for cell in cells for line in cell.lines(ranks)]
    groups: dict[Cell, list[Result]] = {}
    results = tuner.runs.map(lambda case: tuner.result(*case), wanted)
    for (cell, _), result in zip(wanted, results, strict=True):
        if result:
            groups.setdefault(cell, []).append(result)
    return {cell: of for cell, of in groups.items() if of[0].line == next(cell.lines())}


class Study(Report):
    """A report on the results of each cell.

    Args:
        groups: the results, those of the cell's first line first.
        seeds: how many.
        figures: by the endings of the files' names.
        rates: of links, in bits a second, on which seconds are predicted.
    """

    def __init__(
        self, groups: Groups, seeds: int, figures: Figures, rates: Sequence[float] = ()
    ) -> None:
        super().__init__(f"Test loss in nats, {seeds} seeds")
        self.groups, self.figures = groups, figures
        self.tables = {}
        for cell, results in groups.items():
            task = TASKS[cell.task]
            minibatch = f"a rank's minibatch {task.minibatch}"
            title = f"{cell.title}: {minibatch}, margin ±{task.margin:g}"
            self.tables[title] = [
                _row(task, result, results) | _seconds(result.run, rates) for result in results
            ]

    def print(self) -> None:
        """Print a table for every cell, without columns that are empty there."""
        print(f"\n{self.title}")
        for title, rows in self.tables.items():
            head = [name for name in rows[0] if any(row[name] for row in rows)]
            lines = table(head, [[row[name] for name in head] for row in rows])
            print(f"\n{title}\n", *lines, sep="\n")

    def content(self) -> dict[str, Any]:
        return {"title": self.title, "machine": machine(), "tables": self.tables}

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw several figures: convergence.png means convergence-samples.png and more."""
        path = Path(path)
        for name, draw in self.figures.items() if self.groups else ():
            draw(self.groups, path.with_name(f"{path.stem}-{name}{path.suffix}"))


def find(results: Sequence[Result], contender: str, ranks: int, rates: str) -> Result | None:
    line = Line(contender, ranks, rates)
    return next((result for result in results if result.line == line), None)


def peer_of(result: Result, results: Sequence[Result]) -> Result | None:
    """Return a result's peer: on as many ranks, or on one, with rates of the same kind or tuned
    ones."""
    line, peer = result.line, CONTENDERS[result.line.contender].peer
    for ranks, rates in ((line.ranks, line.rates), (line.ranks, "tuned"), (1, "tuned")):
        if peer and (found := find(results, peer, ranks, rates)):
            return found
    return None


def _row(task: Task, result: Result, results: Sequence[Result]) -> dict[str, str]:
    """Return a line of the table by columns."""
    line, run, grid = result.line, result.run, OPTIMIZERS[result.run.optimizer].rates
    at_edge = line.rates == "tuned" and run.lr in (grid[0], grid[-1])
    first, peer, bits = results[0], peer_of(result, results), result.bits_sent(task)
    less = compare(result.final, first.final, task.margin)
    diverged = int((result.final >= round(task.worst[0], 4)).sum())
    return {
        "": result.title,
        "K": str(line.ranks),
        "rates": line.rates,
        "lr": f"{run.lr:g}{'*' * at_edge}",
        "η": "".join(f"{m:g}" for name, m in run.options if name == "block_momentum"),
        "bits sent": f"{bits:.2f}" if bits else "",
        "a quarter in": f"{result.curves[:, task.points // 4 - 1].mean():.4f}",
        "test loss": f"{result.final.mean():.4f}",
        "diverged": str(diverged or ""),
        f"less {first.title}": _said(less) if result is not first else "",
        "median": f"{less.median:+.4f}" if result is not first else "",
        "beside": str(peer or ""),
        "less it": _said(compare(result.final, peer.final, task.margin)) if peer else "",
    }


def _seconds(run: Run, rates: Sequence[float]) -> dict[str, str]:
    return {f"s on {rate_text(rate)}": f"{seconds_of(run, rate):.1f}" for rate in rates}


def _said(less: Comparison) -> str:
    low, high = less.interval_95
    return f"{less.mean:+.4f} ({low:+.4f} to {high:+.4f}) {less.verdict}"
