"""All algorithms on K logical ranks against serial SGD: test loss, paired by seed.

Two tasks: scikit-learn's digits, and the next byte of the Python library's source. A seed decides
the data's split, the initial model and the order of the samples, alike for everybody; every run
has the same number of samples; each rank has minibatches of 8 (digits) or 16 samples and blocks of
8 minibatches, so that 64 ranks synchronize 16 times. The learning rate falls linearly to a tenth.

Rates: "tuned" ones are the best of a grid (factors of 2) on seeds that are not reported; "equal"
ones are those tuned for serial SGD. Other entries say what they are.

"Equivalent" means that the mean difference in test loss lies within the margin with 95 %
confidence (two one-sided tests: the 90 % bootstrap interval does). Runs that diverge count as the
loss of knowing nothing.
"""

from __future__ import annotations

import argparse
import os

from ..report import positive
from .runs import Runs
from .study import Plan, study
from .summary import Summary
from .tasks import TASKS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", choices=[*TASKS, "both"], default="both", help="(default: both)")
    parser.add_argument(
        "--seeds", type=positive, metavar="N", help="that are reported (default: 10; quick: 3)"
    )
    parser.add_argument(
        "--tuning-seeds",
        type=positive,
        metavar="N",
        help="others, to choose rates on (default: 6 for digits, 2 for bytes; quick: 1)",
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        nargs="+",
        metavar="K",
        help="of 4, 8, 16, 32, 64 (default: all; quick: 8)",
    )
    parser.add_argument("--quick", action="store_true", help="an eighth of the samples")
    parser.add_argument(
        "--jobs",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="runs at a time (default: as many as there are cores)",
    )
    parser.add_argument(
        "--runs",
        metavar="FILE",
        help="every run's losses, as JSON: written, and what is there already is not run again",
    )


def main(options: argparse.Namespace) -> Summary:
    with Runs(options.jobs, options.runs) as runs:
        return Summary(study(plan_of(options), runs))


def plan_of(options: argparse.Namespace) -> Plan:
    quick = options.quick
    return Plan(
        tasks=list(TASKS) if options.task == "both" else [options.task],
        seeds=options.seeds or (3 if quick else 10),
        tuning_seeds=options.tuning_seeds or (1 if quick else None),
        ranks=options.ranks or ([8] if quick else None),
        shortened=8 if quick else 1,
    )
