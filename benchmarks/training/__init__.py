"""Training on emulated hosts: our algorithms beside PyTorch's DistributedDataParallel over gloo.

Hosts are network namespaces with limited links, one process of each side on each; the sides play
in turn, with the same models, initial values and minibatches, one thread a rank, SGD with
momentum. Every contender is checked to learn, and to leave the same model on all ranks. Goals at
1 Gbit/s: 4 times as fast as plain DDP and twice as fast as its best hook; never slower than DDP.

"No exchange" trains each rank alone: what the others come close to where communication is free.
Block momentum and post-local SGD synchronize every 16 minibatches, so a step is one of 16.

`--to-loss` times a byte-level language model until it has reached a test loss.
`--table FILE` measures nothing, and prints Markdown tables from an earlier run's JSON.

Needs root, Open MPI or MPICH as `parallel-sgd cluster` does, and PyTorch (`make bench-training`).
"""

from __future__ import annotations

import argparse
import importlib.metadata

from parallel_sgd import UserError
from parallel_sgd.command_line.cluster import emulated_hosts
from parallel_sgd.command_line.units import bits_per_s

from ..report import positive
from .conductor import conducted
from .contenders import CONTENDERS, TIMED, TO_LOSS, side
from .step_times import measure_steps
from .summary import Results, Summary, read
from .tasks import MODELS
from .to_loss import RATES, TARGET, require_same_step, train_to_loss

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
    parser.add_argument("--to-loss", action="store_true", help="time whole runs, not steps")
    parser.add_argument(
        "--target", type=float, default=TARGET, help=f"test loss in nats (default: {TARGET})"
    )
    parser.add_argument(
        "--lr", type=float, help="with --to-loss: for all, in place of each one's own"
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
    if options.lr is not None and not (options.to_loss and options.lr > 0):
        raise UserError(f"--lr {options.lr:g} must be more than 0, and goes with --to-loss")
    sides = list(dict.fromkeys(side(name) for name in names))
    results = Results(options.hosts)
    if "peer" in sides:
        results.machine["torch"] = _torch_version()
    for rate in options.rate:
        with emulated_hosts(options.hosts, rate) as hosts, conducted(hosts, sides) as playing:
            if options.to_loss:
                if len(sides) > 1:
                    require_same_step(playing)
                for name in names:
                    lr = options.lr or RATES[name]
                    results.runs.append(train_to_loss(playing, rate, name, lr, options.target))
            else:
                for model in options.models:
                    results.times += measure_steps(playing, model, rate, names, options.rounds)
    return Summary(results)


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "the benchmark of training needs PyTorch, which is not installed: "
            "make bench-training installs it, or give --only algorithms of ours"
        ) from None
