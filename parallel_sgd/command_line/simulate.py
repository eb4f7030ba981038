"""Train like train.py on N ranks, all of them threads of this process: `parallel-sgd simulate`.

The code and the results are the same, bit for bit, as on N ranks of MPI with one BLAS thread each.
So an algorithm on 64 ranks can be studied on a laptop. Speed is not simulated.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Sequence

from ..argument_parser import Parser
from ..communication import default_timeout, simulate
from ..launcher import THREAD_VARIABLES, add_ranks
from ..validation import require_use
from .train.arguments import read
from .train.command import train_on
from .train.options import parser as train_parser


def main(argv: Sequence[str]) -> int:
    """Run `parallel-sgd simulate`, and return 0.

    Raises:
        UserError: an error in the arguments, the data or the training.
    """
    if "-h" in argv or "--help" in argv:
        _parser().print_help()
        print()
        train_parser().print_help()
        return 0
    args, rest = _parser().parse_known_args(argv)
    missing = {name: "1" for name in THREAD_VARIABLES if name not in os.environ}
    if missing:  # ranks share the cores; BLAS is already loaded, and reads these only then
        command = [sys.executable, "-m", "parallel_sgd", "simulate", *argv]
        os.execve(sys.executable, command, {**os.environ, **missing})
    options, algorithm, optimizer = read(rest)
    require_use("cuda_aware", options.cuda_aware, False, False, "MPI, which simulate does not use")
    simulate(
        args.ranks,
        lambda comm: train_on(copy.copy(options), algorithm, optimizer, comm),
        timeout_s=default_timeout() if options.timeout_s is None else options.timeout_s,
    )
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="parallel-sgd simulate",
        usage="parallel-sgd simulate -n N [option of train.py ...]",
        description="Train on N ranks that are threads of one process, without MPI: the same code "
        "and the same results as `parallel-sgd run -n N train.py`, to study algorithms on more "
        "ranks than there are cores. All other options are those of train.py, below.",
        allow_abbrev=False,
        add_help=False,
    )
    add_ranks(parser.add_argument, "the number of ranks", required=True)
    return parser
