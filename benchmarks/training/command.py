"""Training on emulated hosts: our algorithms beside PyTorch's DistributedDataParallel over gloo.

Hosts are network namespaces with limited links, one process of each side on each; the sides play
in turn, with the same models, initial values and minibatches, one thread a rank, SGD with
momentum. Every contender is checked to learn, and to leave the same model on all ranks. Goals at
1 Gbit/s: 4 times as fast as plain DDP and twice as fast as its best hook; never slower than DDP.

"No exchange" trains each rank alone: what the others come close to where communication is free.
Block momentum and post-local SGD synchronize every 16 minibatches, so a step is one of 16.

`--to-loss` tells the seconds until a byte-level language model (an MLP, or with --torch a small
transformer) has reached a test loss: how many
steps that takes, with a learning rate tuned for each contender on another seed (they are counted on
links without a limit), times the seconds of its steps on each rate's links.
`--torch` trains PyTorch's models on both sides, ours by the doors of `parallel_sgd.torch`: with its
learner, and with DDP and our hook. `--here -n 2` does so, or without --torch, on this machine as it
is: the ranks share its memory.
`--table FILE` measures nothing, and prints Markdown tables from an earlier run's JSON.

Needs root, Open MPI or MPICH as `parallel-sgd cluster` does, and PyTorch (`make bench-training`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from parallel_sgd import UserError
from parallel_sgd.command_line.cluster import emulated_hosts
from parallel_sgd.command_line.units import bits_per_s

from ..report import positive
from .conductor import Conductor, Here, Hosts, conducted
from .contenders import CONTENDERS, PLAIN, TIMED, TIMED_MODULES, TO_LOSS, TO_LOSS_MODULES, side
from .memory import measure_memory
from .own_cost import own_costs
from .step_times import measure_steps
from .summary import Results, Summary
from .summary import read as read_results
from .tasks import MANY, MODELS, MODULES
from .to_loss import learn_all, learners_for, require_same_step, timed_for

RATE = 1e9


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


def read(options: argparse.Namespace) -> Summary:
    return Summary(read_results(options.table), markdown=True)


def main(options: argparse.Namespace) -> Summary:
    if options.hosts < 2:
        raise UserError(f"hosts={options.hosts} must be at least 2: alone nobody communicates")
    _require_known(options)
    timed, to_loss = (TIMED_MODULES, TO_LOSS_MODULES) if options.torch else (TIMED, TO_LOSS)
    names = options.only or (to_loss if options.to_loss else timed)
    if options.to_loss and (others := [name for name in names if name not in to_loss]):
        raise UserError(f"--only {others[0]!r} must be one of {'; '.join(to_loss)} with --to-loss")
    results = Results(
        options.hosts,
        to_loss=names if options.to_loss else (),
        torch=options.torch,
        here=options.here,
    )
    if options.torch or "peer" in map(side, names):
        results.machine["torch"] = _torch_version()
    if options.to_loss:
        goal = results.goal
        known = read_results(options.runs).runs if options.runs else []
        learners = learners_for(names)
        with _playing(options, math.inf, [*names, *learners]) as playing:
            if PLAIN in names:
                require_same_step(playing, goal)
            results.runs += learn_all(playing, goal, names, options.seeds, known)
    models = options.models or list(MODULES if options.torch else MODELS)
    if options.to_loss:
        models = [results.goal.task]
    steppers = timed_for(names)
    if options.own_cost:
        results.own_costs += own_costs([*models, MANY])
    if options.memory:
        alone = partial(_playing, options, math.inf)
        for model in models:
            results.memory += measure_memory(alone, model, steppers)
    for rate in [math.inf] if options.here else options.rate:
        with _playing(options, rate, steppers) as playing:
            for model in models:
                results.times += measure_steps(playing, model, rate, steppers, options.rounds)
    return Summary(results)


def _require_known(options: argparse.Namespace) -> None:
    """Refuse options that say nothing together."""
    if options.runs and not options.to_loss:
        raise UserError(f"--runs {options.runs} goes with --to-loss")
    if options.torch:
        return
    for name in ("own_cost", "memory"):
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')} goes with --torch")
    for name in options.models or ():
        if name not in MODELS:
            raise UserError(f"--models {name} is PyTorch's: it goes with --torch")
    for name in options.only or ():
        if CONTENDERS[name].modules:
            raise UserError(f"--only {name!r} trains PyTorch's models: it goes with --torch")


@contextmanager
def _playing(options: argparse.Namespace, rate: float, names: Iterable[str]) -> Iterator[Conductor]:
    """Both sides of these contenders, as far as there are such, on hosts with links of a rate."""
    sides = list(dict.fromkeys(map(side, names)))
    played_by = {"ours": "torch_ours"} if options.torch else {}
    with ExitStack() as stack:
        if options.here:
            hosts: Hosts = Here(options.hosts)
        else:
            hosts = stack.enter_context(emulated_hosts(options.hosts, rate))
        interface = "lo" if options.here else "eth0"
        yield stack.enter_context(conducted(hosts, sides, played_by=played_by, interface=interface))


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "the benchmark of training needs PyTorch, which is not installed: "
            "make bench-training installs it, or give --only algorithms of ours"
        ) from None
