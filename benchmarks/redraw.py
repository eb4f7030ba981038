"""Draw the figures of the documentation again, from the kept results: `make figures`.

    python -m benchmarks.redraw               all figures
    python -m benchmarks.redraw kernels.png   a single figure

Nothing is measured. The table of benchmarks/results/README.md lists each figure with its results
and the command that measures the results anew. The table is `FIGURES`: a test compares both.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from .__main__ import main as run_benchmark

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Source:
    """
    Attributes:
        benchmark: by name.
        results: the file of results.
        anew: the command that measures the results.
        figure: argument of the drawing; several figures have names with this beginning.
        figures: the kept figures.
    """

    benchmark: str
    results: str
    anew: str
    figure: str
    figures: tuple[str, ...]


def _alone(benchmark: str, name: str, anew: str) -> Source:
    """Return the source of results with a figure of the same name."""
    return Source(benchmark, f"{name}.json", f"make {anew}", f"{name}.png", (f"{name}.png",))


CONVERGENCE = ("samples", "bytes", "ranks", "error-feedback")

FIGURES = (
    _alone("kernels", "kernels", "bench"),
    _alone("kernels", "kernels-avx2", "bench"),
    _alone("entropy-code", "entropy-code", "bench"),
    _alone("exchange", "exchange-2", "bench"),
    _alone("exchange", "exchange-4", "bench"),
    _alone("blocks", "blocks", "bench"),
    _alone("checkpoints", "checkpoints", "bench"),
    _alone("equivalence", "equivalence", "bench"),
    _alone("parameter-server", "parameter-server", "bench"),
    _alone("parameter-server", "parameter-server-links", "bench-links"),
    _alone("plan", "plan", "bench-links"),
    _alone("exchange", "exchange-links", "bench-training"),
    _alone("exchange", "exchange-links-100mbit", "bench-training"),
    _alone("exchange", "exchange-links-200mbit", "bench-training"),
    Source(
        *("training", "training.json", "make bench-training", "training.png"),
        ("training-5M.png", "training-24M.png"),
    ),
    Source(
        *("training", "training-to-loss.json", "make bench-training", "training.png"),
        ("training-bytes.png", "training-to-loss.png"),
    ),
    Source(
        *("training", "training-torch-2.json", "make bench-torch", "training-torch-2.png"),
        ("training-torch-2-24M.png", "training-torch-2-transformer.png"),
    ),
    Source(
        *("training", "training-torch-to-loss.json", "make bench-torch", "training-torch.png"),
        ("training-torch-to-loss.png",),
    ),
    _alone("speedup", "speedup", "bench-speedup"),
    Source(
        *("convergence", "convergence-runs.json", "make convergence", "convergence.png"),
        tuple(f"convergence-{name}.png" for name in CONVERGENCE),
    ),
    *(
        _alone("faults", f"faults-{name}", "bench-faults")
        for name in ("survive", "survive-hosts", "restarts", "openmpi", "mpich", "soak")
    ),
    Source("gpu", "gpu.json", "python -m benchmarks gpu", "gpu.png", ("gpu.png",)),
)


def redraw(source: Source) -> None:
    """Draw the figures of some results, and put the kept figures in place.

    Raises:
        RuntimeError: the benchmark could not draw; the reason is printed.
    """
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        results = str(RESULTS / source.results)
        figure = str(Path(folder) / source.figure)
        if run_benchmark([source.benchmark, "--table", results, "--figure", figure]):
            raise RuntimeError(f"{source.results} cannot be drawn")
        for name in source.figures:
            shutil.copyfile(Path(folder) / name, RESULTS / name)


def table() -> list[str]:
    """Return lines of Markdown: figures, their results, and the measuring command."""
    lines = ["| figures | results | measured by |", "|---|---|---|"]
    for source in FIGURES:
        figures = ", ".join(f"[{name}]({name})" for name in source.figures)
        lines.append(f"| {figures} | [{source.results}]({source.results}) | `{source.anew}` |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.redraw")
    names = [name for source in FIGURES for name in source.figures]
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"{', '.join(names)}; or all")
    chosen = parser.parse_args(argv).figures or names
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(names)}")
    for source in FIGURES:
        if not {*source.figures}.isdisjoint(chosen):
            redraw(source)
            print(f"{', '.join(source.figures)} from {source.results}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
