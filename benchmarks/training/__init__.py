"""Training on emulated hosts: our algorithms beside PyTorch's DistributedDataParallel over gloo.

Hosts are network namespaces with limited links, one process of each side on each; the sides play
in turn, with the same models, initial values and minibatches, one thread a rank, SGD with
momentum. Every contender is checked to learn, and to leave the same model on all ranks. Goals at
1 Gbit/s: 4 times as fast as plain DDP and twice as fast as its best hook; never slower than DDP.

"No exchange" trains each rank alone: what the others come close to where communication is free.
Block momentum and post-local SGD synchronize every 16 minibatches, so a step is one of 16.

`--to-loss` tells the seconds until a byte-level language model has reached a test loss: how many
steps that takes, with a learning rate tuned for each contender on another seed (they are counted on
links without a limit), times the seconds of its steps on each rate's links.
`--table FILE` measures nothing, and prints Markdown tables from an earlier run's JSON.

Needs root, Open MPI or MPICH as `parallel-sgd cluster` does, and PyTorch (`make bench-training`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from parallel_sgd import UserError
from parallel_sgd.command_line.cluster import emulated_hosts
from parallel_sgd.command_line.units import bits_per_s

from ..report import positive
from .conductor import Conductor, conducted
from .contenders import CONTENDERS, PLAIN, TIMED, TO_LOSS, side
from .step_times import measure_steps
from .summary import Results, Summary, read
from .tasks import BYTES, MODELS
from .to_loss import learn_all, learners_for, require_same_step, timed_for

__all__ = ["add_arguments", "main"]

RATE = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=positive, default=4, help="one rank each (default: 4)")
    parser.add_argument(
        "--rate",
        type=bits_per_s,
        nargs="+",
        default=[RATE],
        metavar="R",
        help="of each link: 100mbit, 1gbit, …, unlimited (default: 1gbit)",
    )
    parser.add_argument(
        "--models", choices=MODELS, nargs="+", default=list(MODELS), help="(default: both)"
    )
    parser.add_argument("--rounds", type=positive, default=3, help="of all contenders (default: 3)")
    parser.add_argument(
        "--only", choices=CONTENDERS, nargs="+", metavar="NAME", help="; ".join(CONTENDERS)
    )
    parser.add_argument(
        "--to-loss", action="store_true", help="seconds until a test loss is reached"
    )
    parser.add_argument(
        "--seeds", type=positive, default=3, help="with --to-loss: runs of each (default: 3)"
    )
    parser.add_argument(
        "--runs",
        metavar="FILE",
        help="with --to-loss: the JSON of an earlier run, whose steps are not counted again",
    )
    parser.add_argument("--table", metavar="FILE", help="print Markdown from this JSON file")


def main(options: argparse.Namespace) -> Summary:
    if options.table:
        return Summary(read(options.table), markdown=True)
    if options.hosts < 2:
        raise UserError(f"hosts={options.hosts} must be at least 2: alone nobody communicates")
    names = options.only or (TO_LOSS if options.to_loss else TIMED)
    if options.to_loss and (others := [name for name in names if name not in TO_LOSS]):
        raise UserError(f"--only {others[0]!r} must be one of {'; '.join(TO_LOSS)} with --to-loss")
    if options.runs and not options.to_loss:
        raise UserError(f"--runs {options.runs} goes with --to-loss")
    results = Results(options.hosts, to_loss=names if options.to_loss else ())
    if "peer" in map(side, names):
        results.machine["torch"] = _torch_version()
    if options.to_loss:
        known = read(options.runs).runs if options.runs else []
        learners = learners_for(names)
        with _playing(options.hosts, math.inf, [*names, *learners]) as playing:
            if PLAIN in names:
                require_same_step(playing)
            results.runs += learn_all(playing, names, options.seeds, known)
    models = [BYTES] if options.to_loss else options.models
    timed = timed_for(names)
    for rate in options.rate:
        with _playing(options.hosts, rate, timed) as playing:
            for model in models:
                results.times += measure_steps(playing, model, rate, timed, options.rounds)
    return Summary(results)


@contextmanager
def _playing(count: int, rate: float, names: Iterable[str]) -> Iterator[Conductor]:
    """Both sides of these contenders, as far as there are such, on hosts with links of a rate."""
    sides = list(dict.fromkeys(map(side, names)))
    with emulated_hosts(count, rate) as hosts, conducted(hosts, sides) as conductor:
        yield conductor


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "the benchmark of training needs PyTorch, which is not installed: "
            "make bench-training installs it, or give --only algorithms of ours"
        ) from None
