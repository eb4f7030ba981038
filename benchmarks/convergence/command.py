"""Three studies of the test loss on K logical ranks, paired by seed.

algorithms: all algorithms against serial SGD, on scikit-learn's digits and on the next byte of the
Python library's source. Every run has the same number of samples; each rank has minibatches of 8
(digits) or 16 samples and blocks of 8 minibatches, so 64 ranks synchronize 16 times. "Tuned" rates
are the best of a grid; "equal" rates are those tuned for serial SGD.

compression: gradients of 32 bits down to a tenth of one, each with plain SGD, momentum 0.9 and
Adam, against 32 bits on as many ranks. The digits again, and larger models of the next byte, whose
ranks have minibatches of 64 samples and take the same number of steps for any number of ranks.
Every contender has a tuned rate of its own. More tasks, named by --task, are PyTorch's: a
transformer and an LSTM on the next byte, with torch.optim's SGD of momentum 0.9 and AdamW.

long-blocks: local updates in blocks of 32 minibatches with Adam, as large models are trained today,
beside gradients of 32 bits down to a quarter of one: how many nats behind, and how many bytes sent.

A seed decides the data's split, the initial model and the order of the samples, equally for all
contenders. Rates are tuned over factors of 2, on unreported seeds. The learning rate falls linearly
to a tenth; in the larger models the rate rises from a tenth in the first sixteenth.

"Equivalent" means that the mean difference in test loss lies within the margin with 95 % confidence
(two one-sided tests: the 90 % bootstrap interval does). Runs that diverge count as the loss of
knowing nothing. A rate with a star is the first or last of its grid.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from parallel_sgd import UserError
from parallel_sgd.command_line.units import bits_per_s

from ..report import Report, positive
from ..study import Runs
from .cells import STUDIES, Cell, cells_of
from .figures import FIGURES
from .optimizers import OPTIMIZERS
from .runs import load, write
from .study import Study, Tuner, results_of
from .tasks import TASKS
from .training import Outcome, Run, train


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--study", choices=STUDIES, default="algorithms", help="(default: algorithms)")
    tasks = "(default: all of the study, but PyTorch's)"
    add("--task", choices=TASKS, nargs="+", help=tasks)
    add("--ranks", type=positive, nargs="+", metavar="K", help="(default: all of the study)")
    optimizers = "of the studies that name one (default: all)"
    add("--optimizer", choices=OPTIMIZERS, nargs="+", help=optimizers)
    seeds = "that are reported (default: 10)"
    add("--seeds", type=positive, default=10, metavar="N", help=seeds)
    tuning = (
        "others, to choose rates on (default: 6 for digits, 2 for bytes, 1 for the largest models)"
    )
    add("--tuning-seeds", type=positive, metavar="N", help=tuning)
    cores, jobs = len(os.sched_getaffinity(0)), "runs at a time (default: as many as cores)"
    add("--jobs", type=positive, default=cores, metavar="N", help=jobs)
    runs = "every run's losses, as JSON: written, and what is there already is not run again"
    add("--runs", metavar="FILE", help=runs)
    on = "links, such as 100mbit: a column with the seconds of each run that the planner predicts"
    add("--seconds-on", type=bits_per_s, nargs="+", default=[], metavar="RATE", help=on)
    minutes = (
        "begin no run that will not have ended by then, and report the lines that are complete; "
        "--runs lets the next call go on from there"
    )
    add("--minutes", type=positive, metavar="M", help=minutes)


def main(options: argparse.Namespace) -> Report:
    cells = chosen(options)
    path = Path(options.table or options.runs) if options.table or options.runs else None

    def save(outcomes: Mapping[Run, Outcome]) -> None:
        if path:
            write(path, outcomes)

    with Runs(
        train,
        jobs=options.jobs,
        minutes=0 if options.table else options.minutes,  # a table carries out no run
        known=load(path) if path else {},
        kind=lambda run: (run.task, run.ranks),
        save=save,
    ) as runs:
        tuner = Tuner(runs, options.seeds, options.tuning_seeds)
        groups = results_of(cells, tuner, options.ranks)
    return Study(groups, options.seeds, FIGURES[options.study], options.seconds_on)


read = main


def chosen(options: argparse.Namespace) -> list[Cell]:
    """Return the cells that the options choose of a study.

    Raises:
        UserError: the study has no such cell, or PyTorch is missing.
    """
    study = STUDIES[options.study]
    cells = cells_of(study, options.task, options.optimizer)
    missing = {*(options.task or ())} - {cell.task for cell in cells}
    if not cells or missing:
        studied = ", ".join(dict.fromkeys(cell.task for cell in study))
        raise UserError(
            f"--task {' '.join(sorted(missing))}: with this optimizer there are none but this "
            f"study's: {studied}"
        )
    for cell in cells:
        if TASKS[cell.task].torch and find_spec("torch") is None:
            raise UserError(
                f"--task {cell.task} needs PyTorch: pip install '.[torch]' from the checkout"
            )
    return cells
