"""The studies as data: cells of contenders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .contenders import (
    ALGORITHMS,
    BEGINNINGS,
    CONTENDERS,
    GRADIENTS,
    LONG_BLOCKS,
    Options,
)
from .optimizers import OPTIMIZERS
from .tasks import TASKS
from .training import Run


@dataclass(frozen=True)
class Line:
    """A line of a cell's table.

    Attributes:
        contender: by name.
        ranks: how many.
        rates: the origin of learning rate and options: "tuned"; "equal" to those of the cell's
            first contender; "as 32 bits": those of the peer, compressed by this contender; or
            "gain 1": the peer's rate, for block momentum with a gain of 1.
    """

    contender: str
    ranks: int
    rates: str


@dataclass(frozen=True)
class Cell:
    """Contenders on a task, each compared with the first one.

    Attributes:
        contenders: by name.
        ranks, optimizer: of all contenders; None: each contender's own.
        start: the first rate of the search: the nearer, the sooner the search ends. None: the
            optimizer's.
    """

    task: str
    contenders: tuple[str, ...]
    ranks: int | None = None
    optimizer: str | None = None
    start: float | None = None

    def lines(self, ranks: Sequence[int] | None = None) -> Iterator[Line]:
        """Yield the lines on one rank, and on chosen numbers of ranks; None: on all."""
        for name in self.contenders:
            contender = CONTENDERS[name]
            for k in contender.ranks if self.ranks is None else (self.ranks,):
                for rates in contender.rates if k == 1 or not ranks or k in ranks else ():
                    yield Line(name, k, rates)

    def optimizer_of(self, contender: str) -> str:
        return self.optimizer or CONTENDERS[contender].optimizer

    def start_of(self, contender: str) -> float:
        """Return the first rate of the search for a contender's rate."""
        optimizer = self.optimizer_of(contender)
        start = self.start or OPTIMIZERS[optimizer].start
        return start * FACTORS.get((optimizer, contender), 1)

    def run(self, line: Line, lr: float, options: Options) -> Run:
        """Return the run of a line with the first seed."""
        optimizer, samples = self.optimizer_of(line.contender), TASKS[self.task].budget(line.ranks)
        return Run(self.task, line.contender, optimizer, line.ranks, lr, options, 0, samples)

    @property
    def title(self) -> str:
        task = TASKS[self.task]
        if self.ranks is None:
            return task.title
        steps = f"{task.steps_on(self.ranks)} steps of {self.optimizer}"
        return f"{task.title}, K = {self.ranks}, {steps}"


FACTORS = {
    ("SGD", "sign"): 2,
    ("momentum", "sign"): 1 / 8,
    ("momentum", "PowerSGD-1"): 1 / 2,
    ("Adam", "sign"): 1 / 4,
}
"""By optimizer and contender: how far the best rate is from most contenders'."""

OF_ALGORITHMS = tuple(Cell(task, tuple(ALGORITHMS)) for task in ("digits", "bytes"))

ALL = tuple(GRADIENTS)
WITH_BEGINNINGS = (*ALL, *BEGINNINGS)
SOME = ("32", "2", "1", "0.5", "0.25", "0.1", "sign", "PowerSGD-4")
OF_TORCH = ("32", "1", "0.25", "0.1", "0.5", "4", "2", "4-entropy", "PowerSGD-4")

OF_COMPRESSION = (
    Cell("bytes-256", WITH_BEGINNINGS, 4, "momentum", 0.4),
    Cell("bytes-256", WITH_BEGINNINGS, 4, "Adam", 0.012),
    Cell("bytes-256", ALL, 4, "SGD", 1.6),
    Cell("bytes-256", SOME, 8, "momentum", 0.8),
    Cell("bytes-256", SOME, 16, "momentum", 0.8),
    Cell("bytes-256", ("32", "1", "0.25"), 8, "Adam", 0.024),
    Cell("digits", ALL, 4, "momentum", 0.1),
    Cell("digits", ALL, 4, "Adam", 0.012),
    Cell("digits", ALL, 4, "SGD", 0.8),
    Cell("bytes-1024", ("32", "1", "0.5", "0.25", "PowerSGD-4", "sign"), 4, "momentum", 0.4),
    Cell("bytes-1024-long", ("32", "1", "0.25"), 4, "momentum", 0.4),
    Cell("digits", ALL, 8, "momentum", 0.2),
    Cell("transformer", (*OF_TORCH, "sign"), 4, "momentum", 0.4),
    Cell("transformer", (*OF_TORCH, *BEGINNINGS), 4, "AdamW", 0.006),
    Cell("lstm", (*OF_TORCH, "sign"), 4, "momentum", 0.4),
    Cell("lstm", (*OF_TORCH, *BEGINNINGS), 4, "AdamW", 0.006),
)
"""The most important cells come first, should the time not suffice. PyTorch's tasks take part if
named: PyTorch is not always there. Without signs under AdamW, since these fail under Adam."""

FRONTIER = ("32", "4", "1", "0.25", *LONG_BLOCKS)
OF_OTHER_SIZES = ("32", "1", "long averaging", "long BMUF", "long DiLoCo", "long SparseLoCo")
OF_LONG_BLOCKS = (
    Cell("transformer", FRONTIER, 4, "AdamW", 0.006),
    Cell("bytes-256", FRONTIER, 4, "Adam", 0.012),
    Cell("bytes-256-long", FRONTIER, 4, "Adam", 0.006),
    Cell("bytes-256", OF_OTHER_SIZES, 8, "Adam", 0.024),
    Cell("bytes-256", OF_OTHER_SIZES, 2, "Adam", 0.006),
    Cell("transformer-5M", FRONTIER, 4, "AdamW", 0.0015),
)

STUDIES = {
    "algorithms": OF_ALGORITHMS,
    "compression": OF_COMPRESSION,
    "long-blocks": OF_LONG_BLOCKS,
}


def cells_of(
    study: Sequence[Cell], tasks: Sequence[str] | None, optimizers: Sequence[str] | None
) -> list[Cell]:
    """Return the cells of chosen tasks and optimizers; None: all, but without PyTorch's tasks."""
    return [
        cell
        for cell in study
        if (cell.task in tasks if tasks else not TASKS[cell.task].torch)
        and (not optimizers or cell.optimizer in optimizers)
    ]
