"""The table, the JSON file and the figure of the results."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..report import DrawnReport, table
from .contenders import BATCH
from .figures import draw
from .learning import Learned
from .results import Results


class Summary(DrawnReport):
    """A table, a JSON file and a figure of the results."""

    def __init__(self, results: Results) -> None:
        super().__init__(results.title)
        self.results, self.machine = results, results.machine

    def print(self) -> None:
        """Print medians, and in parentheses the least and the largest."""
        head = (
            "", "workers", "samples/s", "planner", "peak", "average speed-up", "test loss, nats",
            "accuracy, %", "rate",
        )  # fmt: skip
        rows = []
        rates = {(one.contender, one.workers): _rate(one) for one in self.results.learned}
        for point in self.results.points():
            rows.append(
                (
                    point.contender,
                    str(point.workers),
                    point.samples_per_s.text(",.0f"),
                    "" if point.predicted is None else f"{point.predicted:,.0f}",
                    f"{point.peak:.2f}",
                    point.average.text(".2f"),
                    point.loss.text(".3f") if point.loss else "",
                    point.accuracy.text(".1f") if point.accuracy else "",
                    rates.get((point.contender, point.workers), ""),
                )
            )
        print(f"\n{self.title}\n", *table(head, rows), "", *self.notes(), sep="\n")

    def notes(self) -> list[str]:
        """Describe the measurement for the table and the figure."""
        results, options = self.results, self.results.options
        dilation = max(timed.dilation for timed in results.timed)
        return [
            f"A host for each worker, {results.rate}, emulated on {results.machine['cores']} cores "
            f"({results.alone.axpy_gb_per_s:.1f} GB/s, x -= a*y in place). Computing is a wait of "
            f"what one core needs: {results.alone.gradient_s * 1e3:.2f} ms a minibatch of {BATCH}. "
            f"Time is dilated up to {dilation:g} times, so that each host has a core.",
            f"Every run has {options['samples']:,} samples and {options['evaluations']} "
            "evaluations. Peak: best rate of steps; average: a whole training. "
            f"Least to largest of {options['rounds']} rounds and {options['seeds']} seeds. "
            "The asynchronous workers have a server beside them.",
        ]

    def content(self) -> dict[str, Any]:
        points = [asdict(point) for point in self.results.points()]
        return {"title": self.title, **asdict(self.results), "points": points}

    def draw(self, path: str | os.PathLike[str]) -> None:
        draw(self.results, self.title, self.notes(), Path(path))


def _rate(learned: Learned) -> str:
    return f"{learned.lr:g}" + "?" * (not learned.tuned)
