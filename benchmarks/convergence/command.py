"""Two studies of the test loss on K logical ranks, paired by seed.

The first: all algorithms against serial SGD, on scikit-learn's digits and on the next byte of the
Python library's source. Every run has the same number of samples; each rank has minibatches of 8
(digits) or 16 samples and blocks of 8 minibatches, so 64 ranks synchronize 16 times. "Tuned" rates
are the best of a grid; "equal" rates are those tuned for serial SGD.

--compression: gradients of 32 bits down to a tenth of one, each with plain SGD, momentum 0.9 and
Adam, against 32 bits on as many ranks. The digits again, and larger models of the next byte, whose
ranks have minibatches of 64 samples and take the same number of steps for any number of ranks.
Every contender has a tuned rate of its own. More tasks, named by --task, are PyTorch's: a
transformer on the next byte, and a ResNet on Fashion-MNIST, with torch.optim's SGD of momentum 0.9
and AdamW, through `parallel_sgd.torch.Learner`. The ResNet is measured by its test error in %, and
its test set is the published one.

A seed decides the data's split, the initial model and the order of the samples, equally for all
contenders. Rates are tuned over factors of 2, on unreported seeds. The learning rate falls linearly
to a tenth; in the larger models the rate rises from a tenth in the first sixteenth. Rates are
chosen by the test loss, also if errors are compared.

"Equivalent" means that the mean difference in test loss, or error, lies within the margin with 95 %
confidence (two one-sided tests: the 90 % bootstrap interval does). Runs that diverge count as the
loss of knowing nothing. A rate with a star is the first or last of its grid.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from importlib.util import find_spec

from parallel_sgd import UserError

from ..report import Report, positive
from . import algorithms, compression
from .contenders import BEGINNINGS, GRADIENTS
from .optimizers import OPTIMIZERS
from .runs import Runs
from .study import Plan
from .tasks import TASKS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--compression", action="store_true", help="compressed gradients against 32 bits")
    tasks = "(default: all of the study, but PyTorch's; quick: its first)"
    add("--task", choices=TASKS, nargs="+", help=tasks)
    ranks = "of 4, 8, 16, 32, 64 (default: all; quick: 8, or 4 with --compression)"
    add("--ranks", type=positive, nargs="+", metavar="K", help=ranks)
    optimizers = "with --compression (default: all; quick: momentum)"
    add("--optimizer", choices=OPTIMIZERS, nargs="+", help=optimizers)
    contenders = "with --compression (default: all of each task and optimizer)"
    add("--contender", choices=[*GRADIENTS, *BEGINNINGS], nargs="+", help=contenders)
    seeds = "that are reported (default: 10; quick: 3)"
    add("--seeds", type=positive, metavar="N", help=seeds)
    tuning = (
        "others, to choose rates on (default: 6 for digits, 2 for bytes, 1 for the largest "
        "models; quick: 1)"
    )
    add("--tuning-seeds", type=positive, metavar="N", help=tuning)
    add("--quick", action="store_true", help="an eighth of the samples")
    cores, jobs = len(os.sched_getaffinity(0)), "runs at a time (default: as many as cores)"
    add("--jobs", type=positive, default=cores, metavar="N", help=jobs)
    runs = "every run's losses, as JSON: written, and what is there already is not run again"
    add("--runs", metavar="FILE", help=runs)
    minutes = (
        "with --compression: begin no run that will not have ended by then, and report "
        "the lines that are complete; --runs lets the next call go on from there"
    )
    add("--minutes", type=positive, metavar="M", help=minutes)


def main(options: argparse.Namespace) -> Report:
    plan = plan_of(options)
    path, only_read = options.table or options.runs, options.table is not None
    with Runs(options.jobs, path, options.minutes, only_read=only_read) as runs:
        if options.compression:
            return compression.carry_out(plan, runs)
        return algorithms.carry_out(plan, runs)


read = main


def plan_of(options: argparse.Namespace) -> Plan:
    """Return what the options choose of a study.

    Raises:
        UserError: an option or a task is of the other study.
    """
    studied: tuple[str, ...] = algorithms.STUDIED
    if options.compression:
        studied = compression.STUDIED + compression.TORCH_STUDIED
    for name in options.task or ():
        if name not in studied:
            raise UserError(f"--task {name} must be one of this study's: {', '.join(studied)}")
        if name in compression.TORCH_STUDIED and find_spec("torch") is None:
            raise UserError(
                f"--task {name} needs PyTorch: pip install '.[torch]' from the checkout"
            )
    for name in () if options.compression else ("optimizer", "contender", "minutes"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} is for --compression only")
    quick = options.quick
    plan = Plan(
        tasks=options.task,
        ranks=options.ranks,
        optimizers=options.optimizer,
        contenders=options.contender,
        seeds=options.seeds or (3 if quick else 10),
        tuning_seeds=options.tuning_seeds or (1 if quick else None),
        shortened=8 if quick else 1,
    )
    if not quick:
        return plan
    if not options.compression:
        return replace(plan, ranks=plan.ranks or [8])
    return replace(
        plan,
        tasks=plan.tasks or ["bytes-256"],
        ranks=plan.ranks or [4],
        optimizers=plan.optimizers or ["momentum"],
    )
