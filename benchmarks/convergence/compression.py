"""The study of compressed gradients: from 32 bits a value down to a tenth of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..statistics import Comparison
from .contenders import BEGINNINGS, CONTENDERS, GRADIENTS
from .runs import Line, Runs
from .study import Plan, Study, Style, comparison_cells
from .task import LOSS, Task
from .tuning import Climb, Result, uncompressed_bytes

ALL = tuple(GRADIENTS)
SOME = ("32", "2", "1", "0.5", "0.25", "0.1", "sign", "PowerSGD-4")


@dataclass(frozen=True)
class Cell:
    """Contenders that are compared with each other: on one task, with as many ranks.

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
"""The most important cells come first, should the time not suffice."""

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
"""Cells that take part if their tasks are named: PyTorch is not always there. Without signs under
AdamW, since these fail under Adam."""

STUDIED = tuple(dict.fromkeys(cell.task for cell in CELLS))
TORCH_STUDIED = tuple(dict.fromkeys(cell.task for cell in TORCH_CELLS))

STARTS = {
    "SGD": {"digits": 0.8, "bytes-256": 1.6},
    "momentum": {
        **dict.fromkeys(("digits", "fashion-mnist"), 0.1),
        **dict.fromkeys(("bytes-256", "bytes-1024", "bytes-1024-long", "transformer", "lstm"), 0.4),
        "transformer-long": 0.2,
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
"""For contenders whose best rates differ from most."""


def start(cell: Cell, contender: str) -> float:
    """Return the rate at which the search for a contender's rate begins."""
    rate = STARTS[cell.optimizer][cell.task] * (2 if cell.ranks > 4 else 1)
    return rate * FACTORS[cell.optimizer].get(contender, 1)


def cells_of(plan: Plan) -> list[Cell]:
    return [
        cell
        for cell in (CELLS if plan.tasks is None else (*CELLS, *TORCH_CELLS))
        if (plan.tasks is None or cell.task in plan.tasks)
        and (plan.ranks is None or cell.ranks in plan.ranks)
        and (plan.optimizers is None or cell.optimizer in plan.optimizers)
    ]


def contenders_of(plan: Plan, cell: Cell) -> list[str]:
    """Return the contenders in a cell: 32 bits, and the chosen ones."""
    chosen = cell.contenders if plan.contenders is None else ("32", *plan.contenders)
    return [name for name in cell.contenders if name in chosen]


def carry_out(plan: Plan, runs: Runs) -> Compression:
    """Tune each rate, then run the reported seeds, as far as the time suffices."""
    lines = [(cell, name) for cell in cells_of(plan) for name in contenders_of(plan, cell)]
    groups: dict[Cell, list[Result]] = {}
    for (cell, _), result in zip(
        lines, runs.follow([_line(plan, *line) for line in lines]), strict=True
    ):
        if result:
            groups.setdefault(cell, []).append(result)
    measures = dict.fromkeys(plan.task(cell.task).measure for cell in groups)
    texts = ", ".join(f"{measure.name} in {measure.unit}" for measure in measures or [LOSS])
    return Compression(f"{texts.capitalize()}, {plan.seeds} seeds", plan, groups)


def _line(plan: Plan, cell: Cell, contender: str) -> Line[Result]:
    task, begin = plan.task(cell.task), start(cell, contender)
    climb = Climb(cell.task, contender, cell.optimizer, cell.ranks, start=begin)
    setting = yield from climb.tune(task)
    return (yield from setting.report(task, plan.seeds))


class Compression(Study[Cell]):
    """The results of each cell by contender."""

    columns = ("", "bits sent", "lr", "a quarter in", "{}", "less 32 bits", "", "median")
    wide = 3
    styles: ClassVar[dict[str, Style]] = {
        "32": ("black", "-"),
        "16": ("black", ":"),
        "4": ("#4878a8", "-"),
        "4-entropy": ("#2a8a4a", (0, (1, 3))),
        "2": ("#2a8a4a", (0, (5, 1, 1, 1, 1, 1))),
        "sign": ("#cc4444", "-"),
        "1": ("#2a8a4a", "-"),
        "0.5": ("#2a8a4a", "--"),
        "0.25": ("#2a8a4a", ":"),
        "0.1": ("#2a8a4a", "-."),
        "top-k": ("#e08214", "-"),
        "PowerSGD-1": ("#8e5ea2", "--"),
        "PowerSGD-4": ("#8e5ea2", "-"),
        "4-then-1": ("#8bc34a", "-"),
        "1-then-0.25": ("#8bc34a", ":"),
    }
    markers: ClassVar[dict[str, str]] = {
        **{"4-then-1": "^", "1-then-0.25": "^", "4": "s", "16": "s", "sign": "x", "top-k": "v"}
    }
    """Of points without lines; entropy codes with one number of bits, and PowerSGD, have discs."""

    def task_of(self, group: Cell) -> Task:
        return self.plan.task(group.task)

    def heading(self, group: Cell) -> tuple[str, str]:
        task = self.task_of(group)
        steps = f"{task.steps_on(group.ranks)} steps of {group.optimizer}"
        return f"{task.title}, K = {group.ranks}, {steps}", (
            f"a rank's minibatch {task.minibatch}, margin "
            f"±{task.margin:g} {task.measure.unit}, tuned on {task.tuning_seeds} other seeds"
        )

    def subtitle(self) -> str:
        return f"Tuned rates: mean of {self.plan.seeds} seeds"

    def whole(self, cell: Cell) -> Result | None:
        """Return the result with 32 bits."""
        return next((r for r in self.groups[cell] if r.setting.contender == "32"), None)

    def less_whole(self, cell: Cell, result: Result) -> Comparison | None:
        """Compare a result with 32 bits."""
        whole = self.whole(cell)
        return self.paired(result, whole) if whole and whole is not result else None

    def bits_sent(self, cell: Cell, result: Result) -> float:
        """Return the bits of each value, with all overhead; 0 if every run has broken off."""
        task = self.task_of(cell)
        return 32 * result.bytes_sent / cell.ranks / uncompressed_bytes(task, cell.ranks)

    def add_rows(self, group: Cell, result: Result) -> None:
        task, whole = self.task_of(group), self.whole(group)
        measure, contender = task.measure, CONTENDERS[result.setting.contender].title
        title = f"{group.task}, K={group.ranks}, {group.optimizer}, {contender}"
        texts = [result.rate, result.diverged, f"{task.steps_on(group.ranks)} steps"]
        for point, values in [(task.points, result.final), *enumerate(result.curves.T[:-1], 1)]:
            last = point == task.points
            mean = whole.curves[:, point - 1].mean() if whole else None
            text = f"32 bits, {mean:.4f}" if mean else ""
            self.add(
                f"{title}: {measure.name}" + ("" if last else f" after {point}/{task.points}"),
                values.mean(),
                measure.unit,
                "; ".join(filter(None, [text, ", ".join(filter(None, texts)) if last else ""])),
                values.mean() / mean if mean else None,
            )
        if comparison := self.less_whole(group, result):
            said = f"{comparison}: {comparison.verdict}; median {comparison.median:+.4f}"
            name = f"{title}, less 32 bits"
            self.add(name, comparison.mean, measure.unit, said, comparison.reach)
        if result.bytes_sent:
            bits, said = self.bits_sent(group, result), f"{result.bytes_sent} bytes by all ranks"
            self.add(f"{title}: sent", bits, "bits a value", f"32 bits; {said}", bits / 32)

    def cells(self, group: Cell, result: Result) -> Sequence[str]:
        points, comparison = result.curves.shape[1], self.less_whole(group, result)
        return (
            CONTENDERS[result.setting.contender].title,
            f"{self.bits_sent(group, result):.2f}",
            f"{result.setting.lr:g}{'*' if result.setting.at_edge else ''}",
            f"{result.curves[:, points // 4 - 1].mean():.4f}",
            f"{result.final.mean():.4f}",
            *comparison_cells(comparison),
            f"{comparison.median:+.4f}" if comparison else "",
        )

    def figures(self) -> dict[str, Callable[[Path], None]]:
        return super().figures() | {"distance": self.distance}

    def distance(self, path: Path) -> None:
        """Draw the distance from 32 bits at the end, with its 95 % interval, against bits sent."""
        with self.panels(path, self.subtitle()) as grid:
            for cell, axes in grid.items():
                for result in self.groups[cell]:
                    comparison, name = self.less_whole(cell, result), result.setting.contender
                    if comparison is None or not result.bytes_sent:
                        continue
                    low, high = comparison.interval_95
                    axes.errorbar(
                        self.bits_sent(cell, result),
                        comparison.mean,
                        yerr=[[comparison.mean - low], [high - comparison.mean]],
                        color=self.styles[name][0],
                        marker=self.markers.get(name, "o"),
                        linestyle="none",
                        label=CONTENDERS[name].title,
                    )
                task = self.task_of(cell)
                axes.axhspan(-task.margin, task.margin, color="black", alpha=0.08)
                axes.set_xscale("log")
                axes.set_yscale("symlog", linthresh=2 * task.margin)
                axes.set_xlabel("bits sent for each value")
                axes.set_ylabel(f"{task.measure.name} less that of 32 bits, {task.measure.unit}")
