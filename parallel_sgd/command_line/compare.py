"""Compare the runs in several folders: `parallel-sgd compare`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..argument_parser import Parser, path_given
from ..errors import UserError
from ..files import write_whole
from ..training.reports import (
    RunRecord,
    comparison_page,
    comparison_table,
    relative_to_first,
    run_page,
)
from ..training.session.run_folder import REPORT

EXAMPLES = """\
examples:
  parallel-sgd compare runs/32-bit runs/1-bit
  parallel-sgd compare runs/* --html runs.html
"""


def main(argv: Sequence[str]) -> int:
    """Print a table of runs, write a page about the runs if asked to, and return 0. Local.

    Raises:
        UserError: an argument is wrong, a folder is not that of a run, or the page cannot be
            written.
    """
    parser = Parser(
        prog="parallel-sgd compare",
        description="Compare runs: losses, speed, bytes, and the time to a loss that all reached.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="also write a page with the table and charts; of a single run, the page of its "
        f"{REPORT}, made anew",
    )
    args = parser.parse_args(argv)
    runs = [RunRecord.read(path_given("run", path)) for path in args.runs]
    for run in runs:
        if not run.rows:
            raise UserError(
                f"run={str(run.folder)!r} must have rows of metrics: it ended before the first one"
            )
    print("\n".join([comparison_table(runs), *relative_to_first(runs)]))
    if args.html is not None:
        text = run_page(runs[0]) if len(runs) == 1 else comparison_page(runs)
        write_whole("html", path_given("html", args.html), lambda path: path.write_text(text))
        print(f"page: {args.html}")
    return 0
