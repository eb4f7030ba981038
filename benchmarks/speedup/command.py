"""Speed-up against accuracy, and samples a second against workers: the two figures of the papers.

After Chen and Huo (ICASSP 2016), with the speed-up of block momentum beside its accuracy, and Seide
et al. (Interspeech 2014), with samples a second. All algorithms, on 1 to 8 emulated hosts with
limited links, a worker on each, and a further host for the asynchronous algorithm's server; and on
up to 64 by the cost model of `parallel-sgd plan`.

Speed and accuracy are measured apart:

  speed     exchanges, compression and updates run on real links. Computing the gradient is a wait
            of the time of a core, since the hosts share this machine's cores. With more hosts than
            cores, waits are longer and links slower by as many times, and the seconds are divided
            by the same factor: so each host has a core for its exchange.
  accuracy  the model is trained with as many workers as threads of one process, on the same number
            of samples for all, with a learning rate tuned for each on another seed.

Peak speed-up is that of the best round's steps; average that of a whole training: a start, all
steps, eight evaluations (of a part of the test set on every worker), and an end. Each round times
start, an eighth of the steps, an evaluation and the end. Both against serial SGD: a single worker
in 32 bits. Minibatches have 256 samples of each worker. Local updates have blocks
of 8 of them, asynchronous workers push every 4.

Needs root, and Open MPI or MPICH as `parallel-sgd cluster` does; speeds need a quiet machine.
`--table FILE` measures nothing, and prints and draws an earlier run's JSON.
"""

from __future__ import annotations

import argparse
import sys

from parallel_sgd import UserError
from parallel_sgd.command_line.units import bits_per_s
from parallel_sgd.costs import measure_kernel_speeds
from parallel_sgd.launcher.host_resources import usable_cores

from ..plan import measured_link
from ..report import load, positive
from .contenders import BATCH, CONTENDERS, PERIOD, TITLE
from .learning import Learned, cases, learn_all
from .predicted import MORE, predict
from .results import Results, finite
from .step_times import alone, part_steps, time_all
from .summary import Summary

SAMPLES, QUICK_SAMPLES = 163_840, 32_768
EVALUATIONS = 8
ROUNDS, SEEDS = 3, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--hosts",
        type=positive,
        nargs="+",
        default=[1, 2, 4, 8],
        metavar="K",
        help="workers; 1 is always among them (default: 1 2 4 8)",
    )
    add("--rate", type=bits_per_s, default=1e9, help="of every link (default: 1gbit)")
    add("--rounds", type=positive, help=f"of all speeds (default: {ROUNDS}; quick: 1)")
    add("--seeds", type=positive, help=f"of all accuracies (default: {SEEDS}; quick: 1)")
    add(
        "--quick",
        action="store_true",
        help="a fifth of the samples, and learning rates that are not tuned",
    )
    add("--runs", metavar="FILE", help="the JSON of an earlier run: its accuracies are taken")


def read(options: argparse.Namespace) -> Summary:
    return Summary(load(options.table, Results))


def main(options: argparse.Namespace) -> Summary:
    workers = sorted({1, *options.hosts})
    asked = {
        "hosts": workers,
        "rate": finite(options.rate),
        "rounds": options.rounds or (1 if options.quick else ROUNDS),
        "seeds": options.seeds or (1 if options.quick else SEEDS),
        "quick": options.quick,
        "samples": QUICK_SAMPLES if options.quick else SAMPLES,
        "evaluations": EVALUATIONS,
        "task": TITLE,
    }
    samples, cores = asked["samples"], usable_cores()
    if (most := max(workers)) * BATCH * PERIOD > samples:
        raise UserError(f"hosts={most} must be at most {samples // (BATCH * PERIOD)}: a block each")
    known = _known(options.runs, samples, tuned=not options.quick) if options.runs else {}
    results = Results(asked, alone())
    link, speeds = measured_link(options.rate), measure_kernel_speeds()
    for k in workers:
        _say(f"speeds with {k} worker{'s' * (k > 1)}")
        results.timed += time_all(
            *(CONTENDERS, k, options.rate, results.alone, cores),
            rounds=asked["rounds"],
            steps=part_steps(samples, EVALUATIONS, k),
        )
    step_s = sorted(results.serial.step_s)[len(results.serial.step_s) // 2]
    more = sorted({*MORE, *workers} - {1})
    results.predicted += predict(CONTENDERS, more, step_s, link, speeds)
    wanted = cases(list(CONTENDERS), workers)
    results.learned += [known[case] for case in wanted if case in known]
    _say("accuracies")
    results.learned += learn_all(
        [case for case in wanted if case not in known],
        samples,
        asked["seeds"],
        tuned=not options.quick,
        jobs=cores,
    )
    return Summary(results)


def _known(path: str, samples: int, *, tuned: bool) -> dict[tuple[str, int], Learned]:
    """Return the accuracies of an earlier run, by contender and workers.

    Raises:
        UserError: the earlier run trained a different model, or differently.
    """
    earlier = load(path, Results)
    ways = {(earlier.options["task"], one.samples, one.tuned) for one in earlier.learned}
    if ways - {(TITLE, samples, tuned)}:
        raise UserError(f"--runs {path}: it must have trained as this run does, not {ways}")
    return {(one.contender, one.workers): one for one in earlier.learned}


def _say(what: str) -> None:
    print(f"speedup: {what}", file=sys.stderr, flush=True)
