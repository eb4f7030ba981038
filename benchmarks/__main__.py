"""`python -m benchmarks NAME`: measure, print a table, write JSON and a figure.

A benchmark is a module, or a package with a module `command`, with `add_arguments` and `main`. If
its results are not the rows of a report, the module has a function `read`, for `--table`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from parallel_sgd import UserError
from parallel_sgd.validation import checked_path

from .report import Report

NAMES = (
    *("kernels", "entropy-code", "exchange", "blocks", "equivalence", "convergence"),
    *("checkpoints", "parameter-server", "plan", "unequal", "training", "speedup", "faults", "gpu"),
)


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of all benchmarks' options."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=summary)
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name in NAMES:
        module = _module(name)
        command = commands.add_parser(
            name,
            help=(module.__doc__ or "").partition("\n")[0],
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--json", metavar="FILE", help="write the rows as JSON")
        command.add_argument("--figure", metavar="FILE", help="draw it (PNG, SVG, PDF)")
        command.add_argument("--table", metavar="FILE", help="measure nothing: read this JSON")
        module.add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = argument_parser().parse_args(argv)
    module = _module(options.name)
    try:
        for name in ("json", "figure", "table", "runs"):
            if getattr(options, name, None) is not None:
                checked_path(f"--{name}", getattr(options, name), "file")
        report = (module.main if options.table is None else _reader(module))(options)
        report.print()
        if options.json:
            report.write(options.json)
        if options.figure:
            report.draw(options.figure)
    except (UserError, OSError) as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        return 1
    return 0


def _reader(module: Any) -> Any:
    return getattr(module, "read", lambda options: Report.read(options.table))


def _module(name: str) -> Any:
    module = import_module(f".{name.replace('-', '_')}", __package__)
    is_package = hasattr(module, "__path__")
    return import_module(".command", module.__name__) if is_package else module


if __name__ == "__main__":
    sys.exit(main())
