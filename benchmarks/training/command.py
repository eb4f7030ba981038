"""Training on emulated hosts: our algorithms beside PyTorch's DistributedDataParallel over gloo.

Hosts are network namespaces with limited links, a rank on each, which plays both sides in turn:
with the same models, initial values and minibatches, one thread a rank, SGD with momentum. Every
contender is checked to learn, and to leave the same model on all ranks, but for fragments. Goals at
1 Gbit/s: 4 times as fast as plain DDP and twice as fast as its best hook; never slower than DDP.

"No exchange" trains each rank alone: what the others come close to where communication is free.
Block momentum, SparseLoCo and post-local SGD synchronize every 16 minibatches, so a step is one of
16; two fragments of the model do so in turn, each beside 128 samples of training.

`--to-loss` tells the seconds until a byte-level language model (an MLP, or with --torch a small
transformer) has reached a test loss: how many steps that takes, with a learning rate tuned for each
contender on another seed (they are counted on links without a limit), times the seconds of its
steps on each rate's links.
`--torch` trains PyTorch's models on both sides, ours by the doors of `parallel_sgd.torch`: with its
learner, and with DDP and our hook. `--here -n 2` does so, or without --torch, on this machine as it
is: the ranks share its memory.
`--table FILE` measures nothing, and prints the tables of an earlier run's JSON.

Needs root, Open MPI or MPICH as `parallel-sgd cluster` does, and PyTorch (`make bench-training`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
from itertools import product
from typing import Any

from parallel_sgd import UserError
from parallel_sgd.command_line.units import bits_per_s, rate_text

from ..on_ranks import ONE_THREAD, on_hosts, on_ranks
from ..report import load, positive
from .contenders import CONTENDERS, names_for
from .costs import Memory, OwnCost
from .step_times import StepTime
from .summary import NO_FIGURE, Results, Summary
from .tasks import MANY, MODELS, MODULES
from .to_loss import Learned, missing_runs

RATE = 1e9
LONGEST_S = 24 * 3600.0  #: collectives have limits of their own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-n", "--hosts", type=positive, default=4, help="one rank each (default: 4)")
    rates = "of each link: 100mbit, 1gbit, …, unlimited (default: 1gbit)"
    add("--rate", type=bits_per_s, nargs="+", default=[RATE], metavar="R", help=rates)
    models = f"(default: {' and '.join(MODELS)}; with --torch all)"
    add("--models", choices=MODULES, nargs="+", help=models)
    add("--torch", action="store_true", help="PyTorch's models on both sides")
    own_cost = "with --torch, also: what the learner adds to a plain loop of one process"
    add("--own-cost", action="store_true", help=own_cost)
    memory = "with --torch, also: the most memory of a rank, in processes of its own"
    add("--memory", action="store_true", help=memory)
    add("--here", action="store_true", help="ranks of this machine, and no emulated hosts")
    add("--rounds", type=positive, default=3, help="of all contenders (default: 3)")
    add("--only", choices=CONTENDERS, nargs="+", metavar="NAME", help="; ".join(CONTENDERS))
    add("--to-loss", action="store_true", help="seconds until a test loss is reached")
    add("--seeds", type=positive, default=3, help="with --to-loss: runs of each (default: 3)")
    runs = "with --to-loss: the JSON of an earlier run, whose steps are not counted again"
    add("--runs", metavar="FILE", help=runs)
    bars = "the figure has bars: seconds to the last loss of DDP, its best hook, and two of ours"
    add("--bars", action="store_true", help=bars)


def read(options: argparse.Namespace) -> Summary:
    return Summary(load(options.table, Results), bars=options.bars)


def main(options: argparse.Namespace) -> Summary:
    names, modules = _names(options), options.torch
    to_loss = names if options.to_loss else ()
    results = Results(options.hosts, to_loss=to_loss, torch=modules, here=options.here)
    if modules or not all(CONTENDERS[name].ours for name in names):
        results.machine["torch"] = _torch_version()

    def ask(function: str, rate: float = math.inf, **asked: Any) -> Any:
        """Call a function on the ranks of this machine, or of hosts with links of a rate."""
        environ = ONE_THREAD | ({"GLOO_SOCKET_IFNAME": "lo"} if options.here else {})
        how: dict[str, Any] = {"environ": environ, "timeout_s": LONGEST_S}
        if options.here:
            return on_ranks(options.hosts, f"training.{function}", asked, **how)
        return on_hosts(options.hosts, rate, f"training.{function}", asked, **how)

    models = options.models or list(MODULES if modules else MODELS)
    if options.to_loss:
        models = [results.goal.task]
        results.runs += load(options.runs, Results).runs if options.runs else []
        wanted = missing_runs(names, options.seeds, results.runs)
        results.runs += [Learned(**run) for run in ask("to_loss", wanted=wanted, modules=modules)]
    for model in [*models, MANY] if options.own_cost else ():
        cost = on_ranks(1, "training.costs:measure_own", {"model": model}, environ=ONE_THREAD)
        results.own_costs.append(OwnCost(**cost))
    for model, name in product(models, names) if options.memory else ():
        memory = ask("costs:measure_memory", model=model, name=name)
        results.memory.append(Memory(**memory))
    asked = {"models": models, "names": names, "rounds": options.rounds, "modules": modules}
    for rate in [math.inf] if options.here else options.rate:
        times = ask("step_times", rate, **asked)
        results.times += [StepTime(rate=rate_text(rate), **time) for time in times]
    return Summary(results, bars=options.bars)


def _names(options: argparse.Namespace) -> list[str]:
    """Return the contenders; refuse options that say nothing together."""
    if options.hosts < 2:
        raise UserError(f"hosts={options.hosts} must be at least 2: alone nobody communicates")
    if options.figure and not options.to_loss:
        raise UserError(NO_FIGURE)
    if options.bars and not options.figure:
        raise UserError("--bars goes with --figure")
    if options.runs and not options.to_loss:
        raise UserError(f"--runs {options.runs} goes with --to-loss")
    if not options.torch:
        for name in ("own_cost", "memory"):
            if getattr(options, name):
                raise UserError(f"--{name.replace('_', '-')} goes with --torch")
        for name in options.models or ():
            if name not in MODELS:
                raise UserError(f"--models {name} is PyTorch's: it goes with --torch")
    names = names_for(options.torch, options.to_loss)
    for name in options.only or ():
        if name not in names:
            raise UserError(f"--only {name!r} must be one of {'; '.join(names)} with these options")
    return options.only or names


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "the benchmark of training needs PyTorch, which is not installed: "
            "make bench-training installs it, or give --only algorithms of ours"
        ) from None
