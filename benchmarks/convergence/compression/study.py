"""The plan: which contenders meet in which cell, and the lines that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...statistics import Comparison, compare
from ..runs import Line, Runs
from ..task import Task
from ..tasks import TASKS
from ..tuning import Climb, Result, uncompressed_bytes
from .contenders import BEGINNINGS, CONTENDERS

ALL = tuple(name for name in CONTENDERS if name not in BEGINNINGS)
SOME = ("32", "2", "1", "0.5", "0.25", "0.1", "sign", "PowerSGD-4")


@dataclass(frozen=True)
class Cell:
    """Those who are compared with each other: all on one task, with as many ranks.

    Attributes:
        task, optimizer, contenders: by name; "32" is what the others are compared with.
    """

    task: str
    ranks: int
    optimizer: str
    contenders: tuple[str, ...]


CELLS = (
    Cell("bytes-256", 4, "momentum", (*ALL, *BEGINNINGS)),
    Cell("bytes-256", 4, "Adam", (*ALL, *BEGINNINGS)),
    Cell("bytes-256", 4, "SGD", ALL),
    Cell("bytes-256", 8, "momentum", SOME),
    Cell("bytes-256", 16, "momentum", SOME),
    Cell("bytes-256", 8, "Adam", ("32", "1", "0.25")),
    *(Cell("digits", 4, optimizer, ALL) for optimizer in ("momentum", "Adam", "SGD")),
    Cell("bytes-1024", 4, "momentum", ("32", "1", "0.5", "0.25", "PowerSGD-4", "sign")),
    Cell("bytes-1024-long", 4, "momentum", ("32", "1", "0.25")),
    Cell("digits", 8, "momentum", ALL),
)
"""What is worth most comes first, should the time not suffice."""

OF_TORCH = ("32", "1", "0.25", "0.1", "0.5", "4", "2", "4-entropy", "PowerSGD-4")

TORCH_CELLS = (
    *(
        Cell(task, 4, optimizer, (*OF_TORCH, *others))
        for task in ("transformer", "fashion-mnist", "lstm")
        for optimizer, others in (("momentum", ("sign",)), ("AdamW", tuple(BEGINNINGS)))
    ),
    *(
        Cell("transformer-long", 4, optimizer, ("32", "1", "0.25", *others))
        for optimizer, others in (("momentum", ()), ("AdamW", tuple(BEGINNINGS)))
    ),
)
"""Take part where their tasks are named: PyTorch is not always there. Without signs under AdamW, as
these fail under Adam."""

STUDIED = tuple(dict.fromkeys(cell.task for cell in CELLS))
TORCH_STUDIED = tuple(dict.fromkeys(cell.task for cell in TORCH_CELLS))

STARTS = {
    "SGD": {"digits": 0.8, "bytes-256": 1.6},
    "momentum": {
        "digits": 0.1,
        "bytes-256": 0.4,
        "bytes-1024": 0.4,
        "bytes-1024-long": 0.4,
        "transformer": 0.4,
        "transformer-long": 0.2,
        "fashion-mnist": 0.1,
        "lstm": 0.4,
    },
    "Adam": {"digits": 0.012, "bytes-256": 0.012},
    "AdamW": {
        "transformer": 0.006,
        "transformer-long": 0.003,
        "fashion-mnist": 0.012,
        "lstm": 0.006,
    },
}
"""Rates at which the search begins on 4 ranks, by optimizer and task: the nearer, the sooner it
ends. On more ranks, whose minibatches are larger, it begins at twice that."""

FACTORS: dict[str, dict[str, float]] = {
    "SGD": {"sign": 2},
    "momentum": {"sign": 1 / 8, "PowerSGD-1": 1 / 2},
    "Adam": {"sign": 1 / 4},
    "AdamW": {},
}
"""For those who want other rates than most."""


def start(cell: Cell, contender: str) -> float:
    """Where the search for its rate begins."""
    rate = STARTS[cell.optimizer][cell.task] * (2 if cell.ranks > 4 else 1)
    return rate * FACTORS[cell.optimizer].get(contender, 1)


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        tasks, ranks, optimizers: of the cells that take part; None: all, but PyTorch's tasks.
        seeds: that are reported, from 0 on.
        tuning_seeds: how many others rates are chosen on; None: each task's.
        shortened: so many times fewer steps, or samples, than the tasks have.
        contenders: that take part, beside 32 bits; None: all of a cell.
    """

    tasks: Sequence[str] | None = None
    ranks: Sequence[int] | None = None
    optimizers: Sequence[str] | None = None
    seeds: int = 10
    tuning_seeds: int | None = None
    shortened: int = 1
    contenders: Sequence[str] | None = None

    @property
    def cells(self) -> list[Cell]:
        return [
            cell
            for cell in (CELLS if self.tasks is None else (*CELLS, *TORCH_CELLS))
            if (self.tasks is None or cell.task in self.tasks)
            and (self.ranks is None or cell.ranks in self.ranks)
            and (self.optimizers is None or cell.optimizer in self.optimizers)
        ]

    def contenders_of(self, cell: Cell) -> list[str]:
        """With 32 bits, which the others are compared with."""
        chosen = cell.contenders if self.contenders is None else ("32", *self.contenders)
        return [name for name in cell.contenders if name in chosen]

    def task(self, name: str) -> Task:
        return TASKS[name].shortened(self.shortened, self.tuning_seeds)

    def line(self, cell: Cell, contender: str) -> Line[Result]:
        """Tune the rate, then run what is reported."""
        task = self.task(cell.task)
        begin = start(cell, contender)
        climb = Climb(cell.task, contender, cell.optimizer, cell.ranks, start=begin)
        setting = yield from climb.tune(task)
        return (yield from setting.report(task, self.seeds))


@dataclass
class Results:
    """The results of each cell by contender, as far as they are complete."""

    plan: Plan
    cells: dict[Cell, dict[str, Result]] = field(default_factory=dict)

    def compare(self, cell: Cell, contender: str) -> Comparison | None:
        """With 32 bits."""
        ours, theirs = self.cells[cell][contender], self.cells[cell].get("32")
        if theirs is None or theirs is ours:
            return None
        return compare(ours.final, theirs.final, TASKS[cell.task].margin)

    def bits_sent(self, cell: Cell, result: Result) -> float:
        """Of each value, with all that goes with it; 0 where every run has broken off."""
        task = self.plan.task(cell.task)
        return 32 * result.bytes_sent / cell.ranks / uncompressed_bytes(task, cell.ranks)


def study(plan: Plan, runs: Runs) -> Results:
    """Carry out the plan, as far as the time suffices."""
    lines = [(cell, name) for cell in plan.cells for name in plan.contenders_of(cell)]
    results = Results(plan)
    for (cell, name), result in zip(
        lines, runs.follow([plan.line(*line) for line in lines]), strict=True
    ):
        if result:
            results.cells.setdefault(cell, {})[name] = result
    return results
