"""`python -m benchmarks NAME`: measure, print a table, write JSON and a figure."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from parallel_sgd import UserError
from parallel_sgd.validation import checked_path

from .figures import draw
from .report import Report

NAMES = {
    "kernels": "CPU kernels against memory bandwidth and NumPy",
    "entropy-code": "its lengths beside the entropy of what it codes, its speed beside rANS",
    "exchange": "sums over K ranks against MPI_Allreduce and the theory; over links beside gloo",
    "blocks": "local steps and the end of a block against kernel and exchange alone",
    "equivalence": "4 ranks at 1 bit against serial SGD on digits, paired seeds",
    "convergence": "all algorithms on K logical ranks against serial SGD, paired seeds",
    "checkpoints": "writing a checkpoint against a plain write, and what training pays for it",
    "parameter-server": "pushes, pulls and embedding rows against a bare loop of MPI",
    "plan": "the cost model of `parallel-sgd plan` against exchanges on emulated hosts; needs root",
    "training": "whole steps beside PyTorch DDP and its hooks on emulated hosts; needs root",
    "speedup": "speed-up against accuracy, and samples/s against workers; needs root",
    "faults": "kills, stops, cut links, full disks at random moments; and a soak",
    "gpu": "CUDA kernels, staging, exchanges of ranks that share a GPU; needs a GPU",
}

OF_THEIR_OWN = (
    "convergence",
    "faults",
    "speedup",
    "training",
)  #: whose JSON, tables and figures are of another form


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of all benchmarks' options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, help_text in NAMES.items():
        module = _module(name)
        command = commands.add_parser(
            name,
            help=help_text,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--json", metavar="FILE", help="write the rows as JSON")
        command.add_argument("--figure", metavar="FILE", help="draw it (PNG, SVG, PDF)")
        module.add_arguments(command)
        command.add_argument("--table", metavar="FILE", help="measure nothing: read this JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = argument_parser().parse_args(argv)
    try:
        for name in ("json", "figure", "table", "runs"):
            if getattr(options, name, None) is not None:
                checked_path(f"--{name}", getattr(options, name), "file")
        read = options.name not in OF_THEIR_OWN and options.table
        report = Report.read(options.table) if read else _module(options.name).main(options)
        report.print()
        if options.json:
            report.write(options.json)
        if options.figure:
            draw(report, options.figure)
    except (UserError, OSError) as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        return 1
    return 0


def _module(name: str) -> Any:
    module = import_module(f".{name.replace('-', '_')}", __package__)
    is_package = hasattr(module, "__path__")
    return import_module(".command", module.__name__) if is_package else module


if __name__ == "__main__":
    sys.exit(main())
